"""ZeRO-2 on CPU ranks: it trains as DDP does, and says so when it cannot."""

from __future__ import annotations

import copy
import itertools
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import pg_sdma
from common.gpt import GPT, GPTConfig
from common.text import ByteBatches, load_text
from pg_sdma.zero2 import AdamW, Zero2, reduction

GPT_SIZES = GPTConfig(hidden=32, layers=3, heads=2, seq=32)
LEARNING_RATE = 3e-4


def follow_ddp(steps, batch, micro_steps, shard_dtype):
    """Trains with DDP and with ZeRO-2; returns both losses of each step, (2, steps), mean over the
    ranks, and ZeRO-2's parameters."""
    model = GPT(GPT_SIZES)
    model.initialise(seed=0)
    whole = copy.deepcopy(model)
    ddp = DistributedDataParallel(whole)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    if dist.get_rank() > 0:
        model.initialise(seed=1)  # rank 0's counts
    zero = Zero2(model, model.blocks, shard_dtype=shard_dtype)
    sharded_optimizer = AdamW(zero, lr=LEARNING_RATE)
    batches = ByteBatches(
        load_text(), batch, GPT_SIZES.seq, 0, dist.get_rank(), dist.get_world_size()
    )
    losses = torch.zeros(2, steps, dtype=torch.float64)
    for step in range(steps):
        inputs, targets = (x.chunk(micro_steps) for x in batches(step))
        for micro_step, part in enumerate(zip(inputs, targets, strict=True)):
            for row, module in enumerate((ddp, model)):
                last = micro_step == micro_steps - 1
                with ddp.no_sync() if module is ddp and not last else nullcontext():
                    loss = module(*part) / micro_steps
                    loss.backward()
                losses[row, step] += loss.detach()
        clip_grad_norm_(whole.parameters(), 1.0)
        zero.clip_grad_norm_(1.0)
        for one in (optimizer, sharded_optimizer):
            one.step()
            one.zero_grad()
    dist.all_reduce(losses)
    return losses / dist.get_world_size(), dict(model.named_parameters())


def check_follows(results, bound):
    (losses, parameters), *others = results
    assert losses.isfinite().all()
    assert losses[0, -1] < losses[0, 0] - 0.1
    assert (losses[0] - losses[1]).abs().max() <= bound
    for _, others_parameters in others:
        for name, parameter in parameters.items():
            assert torch.equal(parameter, others_parameters[name]), name


@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_follows_ddp(ranks, size):
    check_follows(ranks(size).run(follow_ddp, 20, 4, 2, torch.float32), 1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_follows_ddp_for_long(ranks, size):
    results = ranks(size).run(follow_ddp, 200, 4, 2, torch.float32, timeout=590)
    check_follows(results, 1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_with_bf16_shards_stays_close(ranks, size):
    results = ranks(size).run(follow_ddp, 200, 8, 8, torch.bfloat16, timeout=590)
    check_follows(results, 1e-3)


class Odd(nn.Module):
    """No size divides by anything; one weight is used twice, one is frozen, one is alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 7))
            for width in (3, 11, 1, 5)
        )
        self.blocks[1][0].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale)

    def loss(self, x):
        return nn.functional.cross_entropy(self(x), (x + 1) % 13)


def tokens(generator):
    return torch.randint(13, (5,), generator=generator)


def pair(group=None, **options):
    """The same odd model unsharded and in ZeRO-2, and this rank's source of data."""
    torch.manual_seed(3)
    plain = Odd()
    model = copy.deepcopy(plain)
    zero = Zero2(model, model.blocks, group=group, shard_dtype=torch.float32, **options)
    return plain, model, zero, torch.Generator().manual_seed(dist.get_rank())


def backward(plain, model, generator, micro_steps=1):
    for _ in range(micro_steps):
        x = tokens(generator)
        plain.loss(x).backward()
        model.loss(x).backward()


def average(plain, group=None):
    """What DDP would do, written down plainly."""
    for parameter in plain.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def assert_close(plain, model):
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def train_odd(members, buffers, master_dtype):
    group = dist.new_group(members)
    if dist.get_rank() in members:
        plain, model, zero, generator = pair(group, buffers=buffers, master_dtype=master_dtype)
        names = [name for name, _ in plain.named_parameters()]
        decayed = [name for name in names if name.endswith("weight")]
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in plain.named_parameters() if n in decayed]},
                {
                    "params": [p for n, p in plain.named_parameters() if n not in decayed],
                    "weight_decay": 0,
                },
            ],
            lr=0.01,
        )
        sharded = dict(zero.named_parameters())
        groups = [
            {"params": [p for n, p in sharded.items() if n in decayed]},
            {"params": [p for n, p in sharded.items() if n not in decayed], "weight_decay": 0},
        ]
        sharded_optimizer = AdamW(zero, groups, lr=0.01)
        for _ in range(4):
            backward(plain, model, generator, micro_steps=3)
            average(plain, group)
            norm = clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.5)
            torch.testing.assert_close(zero.clip_grad_norm_(0.5), norm)
            torch.testing.assert_close(zero.grad_norm().item(), min(0.5, norm.item()))
            optimizer.step()
            optimizer.zero_grad()
            sharded_optimizer.step()
            assert_close(plain, model)
        dist.barrier(group)
    dist.barrier()


@pytest.mark.parametrize(
    ("members", "buffers", "master_dtype"),
    [
        ([0, 1, 2, 3], 2, torch.float32),
        ([3, 0, 2], 1, None),
        ([1, 3], 3, torch.float32),
        ([2], 9, torch.float32),
    ],
)
def test_any_sizes_in_any_group(ranks, members, buffers, master_dtype):
    ranks(4).run(train_odd, members, buffers, master_dtype)


def use_sgd():
    plain, model, zero, generator = pair()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, zero)]
    for _ in range(3):
        backward(plain, model, generator)
        average(plain)
        zero.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        zero.gather()
        assert_close(plain, model)


def test_an_optimizer_of_torch_works_too(ranks):
    ranks(2).run(use_sgd)


def own_nothing():
    model = nn.Linear(1, 1)
    zero = Zero2(model, [model])
    optimizer = AdamW(zero, lr=0.5)
    before = model.weight.item()
    model(torch.ones(1)).backward()
    optimizer.step()
    return len(list(zero.parameters())), model.weight.item() != before


def test_a_rank_may_own_nothing(ranks):
    assert ranks(4).run(own_nothing) == [(1, True), (1, True), (0, True), (0, True)]


def resume(steps_before, steps_after):
    """Trains on and on, and a second time from the state in between; returns both models."""

    def start(seed):
        torch.manual_seed(1)
        model = Odd().bfloat16()
        zero = Zero2(model, model.blocks, seed=seed)
        return model, zero, AdamW(zero, lr=0.01)

    def train(model, optimizer, steps):
        for step in steps:
            for micro_step in range(3):
                torch.manual_seed(1000 * step + 10 * micro_step + dist.get_rank())
                model.loss(tokens(None)).backward()
            optimizer.step()

    model, zero, optimizer = start(seed=1)
    train(model, optimizer, range(steps_before))
    state = copy.deepcopy([zero.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(steps_before, steps_before + steps_after))
    again, zero_again, optimizer_again = start(seed=2)
    zero_again.load_state_dict(state[0])
    optimizer_again.load_state_dict(state[1])
    train(again, optimizer_again, range(steps_before, steps_before + steps_after))
    return [dict(m.named_parameters()) for m in (model, again)]


def test_a_loaded_state_goes_on_with_the_same_bits(ranks):
    for first, second in ranks(2).run(resume, 2, 3):
        for name, parameter in first.items():
            assert torch.equal(parameter, second[name]), name


def message_of(function, *arguments):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        function(*arguments)
    return str(caught.value)


def first_block_fails(model):
    def fail(_):
        raise RuntimeError("on purpose")

    return model.blocks[0][0].weight.register_hook(fail)


def misuse():
    """Messages by mistake; after each the same objects train on."""
    plain, model, zero, generator = pair()
    optimizer = AdamW(zero)
    messages = {}
    hook = first_block_fails(model)
    messages["backward"] = message_of(model.loss(tokens(generator)).backward)
    hook.remove()
    messages["failed before the step"] = message_of(optimizer.step)
    messages["failed before the next"] = message_of(model.loss(tokens(generator)).backward)
    model.zero_grad()

    model.loss(tokens(generator)).backward()
    messages["state"] = message_of(zero.state_dict)
    optimizer.zero_grad()

    model.head.weight.grad = torch.zeros_like(model.head.weight)
    messages["foreign"] = message_of(model.loss(tokens(generator)).backward)
    model.head.weight.grad = None
    optimizer.zero_grad()

    graph = model.loss(tokens(generator))
    messages["graph"] = message_of(lambda: graph.backward(create_graph=True))
    optimizer.zero_grad()

    state = zero.state_dict()
    messages["model"] = message_of(zero.load_state_dict, {**state, "parameters": {}})

    for parameter in plain.parameters():
        parameter.grad = None
    backward(plain, model, generator)
    average(plain)
    torch.optim.AdamW(plain.parameters()).step()
    optimizer.step()
    assert_close(plain, model)
    return messages


def test_mistakes_are_named_and_leave_no_trace(ranks):
    for rank, messages in enumerate(ranks(2).run(misuse)):
        for mistake, words in {
            "failed before the step": r"did not end .* with zero_grad\(\)",
            "failed before the next": r"did not end; drop it with zero_grad\(\)",
            "state": "state_dict between the micro-steps of step 0",
            "foreign": r"embedding\.weight has a \.grad from elsewhere",
            "graph": "create_graph=True",
            "model": r"is of shape \(.*\) here and missing in the state",
        }.items():
            assert re.search(words, messages[mistake]), (mistake, messages[mistake])
            assert messages[mistake].startswith(f"rank {rank} of 2, ZeRO-2: ")


def spread_nan():
    _, model, zero, generator = pair()
    loss = model.loss(tokens(generator))
    (loss * (torch.nan if dist.get_rank() == 1 else 1)).backward()
    norm = zero.grad_norm()
    AdamW(zero).step()
    return norm.isnan().item(), all(p.isnan().all().item() for p in zero.parameters())


def test_nan_on_one_rank_reaches_all(ranks):
    assert ranks(2).run(spread_nan) == [(True, True)] * 2


def watch_reductions():
    """What happens in which order in one backward."""
    _, model, zero, generator = pair()
    events = []
    reduce_scatter = reduction._reduce_scatter

    def watched(output, input, **options):
        work = reduce_scatter(output, input, **options)
        unit = next(u for u in zero._units if u.buffer and u.buffer.flat is input._base)
        events.append(f"launch {unit.layout.name}")
        wait = work.wait

        class Watched:
            def wait(self):
                events.append(f"wait {unit.layout.name}")
                wait()

        return Watched()

    for index, block in enumerate(model.blocks):
        block[0].weight.register_hook(lambda grad, i=index: events.append(f"backward blocks.{i}"))
    reduction._reduce_scatter = watched
    try:
        model.loss(tokens(generator)).backward()
        zero.finish()
    finally:
        reduction._reduce_scatter = reduce_scatter
    return events


def test_a_reduction_is_waited_for_only_when_its_buffer_is_needed(ranks):
    for events in ranks(2).run(watch_reductions):
        blocks = [event for event in events if "blocks" in event]
        place = {event: index for index, event in enumerate(blocks)}
        assert len(place) == 12
        for index, below in itertools.pairwise([3, 2, 1, 0]):
            assert place[f"launch blocks.{index}"] < place[f"backward blocks.{below}"]
            assert place[f"wait blocks.{index}"] > place[f"launch blocks.{below}"]
        # Those outside of the blocks are never waited for within the backward.
        assert {"wait embedding", "wait Odd"} <= set(events[-4:])


def gather_directly():
    _, model, zero, generator = pair()
    optimizer = AdamW(zero)
    before = direct_calls()
    for _ in range(5):
        model.loss(tokens(generator)).backward()
        optimizer.step()
    return direct_calls() - before, pg_sdma.fast_path_share()


def direct_calls():
    counts = pg_sdma.stats().get("all_gather_into_tensor_coalesced", {})
    return counts.get("direct", {"calls": 0})["calls"]


def test_a_step_gathers_once_and_directly(ranks):
    assert ranks(2).run(gather_directly) == [(5, 1.0)] * 2
