"""Makes micro-steps of what autograd delivers: every unit is reduced once in each backward, in an
order that all ranks share, whatever the order in which gradients arrive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from pg_sdma.zero2.agreement import host_word_device
from pg_sdma.zero2.unit import Run, ShardedUnit


class Backward:
    """Watches the gradients of all units' parameters.

    A unit is reduced when it has all gradients and so have all units before it in the order: the
    blocks from the last to the first, and from the second step on the order in which they came on
    rank 0. What has none when the backward ends is reduced then, as zeros.
    """

    def __init__(self, run: Run, units: Sequence[ShardedUnit], find_unused: bool) -> None:
        self.micro_step = 0  # backwards since the last step
        self._run = run
        self._units = units
        self._once_a_step = [unit for unit in units if unit.once_a_step]
        each = [unit for unit in reversed(units) if not unit.once_a_step]
        self._order = sorted(each, key=lambda unit: not unit.layout.block)
        # Indices of units by their last gradient, in the first backward; then, until the first step
        # ends, what becomes the order.
        self._came: list[int] | None = []
        self._next_order: list[int] | None = None
        self._find_unused = find_unused
        self._place = 0  # in the order: the unit to be launched next
        self._open = False  # within a backward
        self._tasks: set[int] = set()  # autograd's, that are not over
        # Whether a backward runs others within (checkpoints that are reentrant): unknown before the
        # first is over. Its own graph then does not tell what will get a gradient.
        self._nested: bool | None = None
        self._not_reduced = False
        self._nodes: dict[str, Any] = {}
        self._handles: list[Any] = []
        # Weak, or a model could not go: nobody sees what a node of autograd refers to.
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        for unit in units:
            for name, parameter in unit.model.items():
                # Hooks of the node, not of the tensor: autograd.grad does not call them. Somebody
                # has to keep the node, or it goes with its graph.
                node = get_gradient_edge(parameter).node
                self._nodes[name] = node
                place = unit.layout.index, name
                self._handles += [
                    node.register_prehook(partial(_call, before, *place)),
                    parameter.register_post_accumulate_grad_hook(partial(_call, after, *place)),
                ]

    @property
    def failed(self) -> bool:
        """The last backward did not end."""
        return bool(self._tasks)

    @property
    def complete(self) -> bool:
        """`finish` was called since the last backward."""
        return not self._not_reduced and not self._open

    def remove(self) -> None:
        """Drops all gradients, and watches no more."""
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def finish(self) -> None:
        """Everything that has come is in the shards, for the current stream; collective.

        Raises RuntimeError where the last backward did not end.
        """
        self.refuse_unfinished()
        if self._open:
            self._close()
        self.notice_dropped()
        if self._not_reduced:
            for unit in self._once_a_step:
                unit.launch(self.micro_step - 1)
            self._not_reduced = False
        self._run.reducer.finish()
        if self._next_order is not None:
            self._take_order_of_rank_0(self._next_order)
            self._next_order = None

    def next_step(self) -> None:
        self.micro_step = 0

    def reset(self) -> None:
        """Goes on after a backward that did not end."""
        self._run.reducer.finish()
        self._tasks.clear()
        self._open = self._not_reduced = False
        self._place = 0
        if self._came is not None:
            self._came = []
        for unit in self._units:
            unit.reset()

    def refuse_unfinished(self) -> None:
        self._forget_dropped()
        if self._tasks:
            raise RuntimeError(
                f"{self._run.where}: the last backward did not end (it raised an error, or this "
                "one is called within it); drop its gradients with zero_grad()"
            )

    def notice_dropped(self) -> None:
        """Follows what the user has done to the gradients of the model's parameters."""
        dropped = [(unit, names) for unit in self._units if (names := unit.dropped())]
        if dropped:
            self._run.reducer.finish()
            for unit, names in dropped:
                unit.drop(names)

    def _before(self, index: int, name: str) -> None:
        unit = self._units[index]
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._enter(task)
        if name in unit.arrived:
            self._again(unit, name)
        unit.receive(name)

    def _after(self, index: int, name: str) -> None:
        unit = self._units[index]
        unit.received(name)
        if not unit.missing:
            if self._came is not None:
                self._came.append(unit.layout.index)
            self._advance()

    def _enter(self, task: int) -> None:
        """The first gradient of one of autograd's tasks: of a backward, or of one within it."""
        # Within another one, it goes on with that one's. The other one may also have failed: then
        # `_again` says so.
        self._forget_dropped()
        if not self._tasks and not self._open:
            self._begin()
        self._tasks.add(task)
        # mypy: torch has no types for its engine.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._leave, task))  # type: ignore[attr-defined]

    def _forget_dropped(self) -> None:
        """After a backward that did not end, the user may have dropped what came of it."""
        if self._tasks and all(p.grad is None for u in self._units for p in u.model.values()):
            self.reset()

    def _leave(self, task: int) -> None:
        self._tasks.discard(task)
        if torch._C._current_autograd_node() is not None:
            # Another backward's node has run this one. Where no gradient of that one comes, what
            # is open is closed by whatever comes next.
            self._nested = True
            return
        self._tasks.clear()
        self._close()
        if self._nested is None:
            self._nested = False

    def _again(self, unit: ShardedUnit, name: str) -> None:
        """A second gradient in what was taken for one backward."""
        if self._nested and len(self._tasks) == 1 and unit.launched:
            self._close()
            self._begin()
        elif not self._nested or unit.launched:
            raise RuntimeError(
                f"{self._run.where}: {name} has had its gradient in a backward that did not end; "
                "drop it with zero_grad(). Where checkpoints share parameters, make them with "
                "use_reentrant=False"
            )

    def _begin(self) -> None:
        self.notice_dropped()
        self._open = True
        known = self._find_unused and self._nested is False
        will = torch._C._will_engine_execute_node
        for unit in self._units:
            unit.missing = {
                name
                for name, parameter in unit.model.items()
                if parameter.requires_grad and (not known or will(self._nodes[name]))
            }
        self._advance()

    def _advance(self) -> None:
        while self._place < len(self._order):
            if self._order[self._place].missing:
                break
            self._launch_next()

    def _launch_next(self) -> None:
        unit = self._order[self._place]
        unit.launch(self.micro_step)
        unit.put_away()
        unit.launched = True
        self._place += 1

    def _close(self) -> None:
        while self._place < len(self._order):
            self._launch_next()
        for unit in self._once_a_step:
            unit.put_away()
        for unit in self._units:
            unit.arrived.clear()
            unit.launched = False
        if self._came is not None:
            came = dict.fromkeys((*self._came, *(unit.layout.index for unit in self._order)))
            self._next_order = [index for index in came if not self._units[index].once_a_step]
            self._came = None
        self._place = 0
        self._open = False
        self._not_reduced = True
        self.micro_step += 1

    def _take_order_of_rank_0(self, came: list[int]) -> None:
        order = torch.tensor(came, dtype=torch.int64, device=host_word_device(self._run.group))
        if came:
            dist.broadcast(order, group=self._run.group, group_src=0)
        self._order = [self._units[index] for index in order.tolist()]


def _call(method: weakref.WeakMethod[Any], index: int, name: str, _: Any) -> None:
    watching = method()
    if watching is not None:
        watching(index, name)
