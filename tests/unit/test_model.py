"""The model of more ranks: its formulas by hand, against what was measured, and in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pg_sdma.cli import main
from pg_sdma.model import CONSTANTS, MACHINES, RANKS, SIZES, Machine, Model, rows_of
from pg_sdma.model_page import page

ROOT = Path(__file__).parents[2]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Round numbers, so that a formula can be worked out by hand.
BY_HAND = {
    "python": 5,
    "handshake": 7,
    "copy_call": 6,
    "memory_call": 2,
    "event_call": 1,
    "line": 0.5,
    "lines": 4,
    "alpha": 30,
    "peer": 3,
    "h200": 400,
    "mi300x_link": 50,
    "network": 25,
    "queue": 1000,
}


def test_the_host_s_cost_by_hand() -> None:
    model = Model(BY_HAND)
    # An event, a batch a rank, a copy a peer.
    assert model.enqueue(2) == 1 + 2 * 2 + 1 * 6 == 11
    assert model.enqueue(8) == 1 + 8 * 2 + 7 * 6 == 59
    assert model.enqueue(8, pieces=4) == 1 + 16 + 28 * 6 == 185
    assert model.enqueue_batched() == 1 + 4 + 6
    # Two more peers: eight lines.
    assert model.handshake(2) == 7
    assert model.handshake(4) == 7 + 2 * 4 * 0.5 == 11
    assert model.host(4) == 5 + 11 + (1 + 8 + 18)
    assert model.page_reads(4) == 4 * 3 * (4 + 2)
    # Two writes, three waits for `ready` and three for `done`, three copies.
    assert model.calls_ahead(4) == 1000 // 11


def test_the_device_s_time_by_hand() -> None:
    model = Model(BY_HAND)
    switch = Machine("", 8, "h200")
    # Seven shards of 4 MB at 400 GB/s, and six peers more than two ranks have.
    assert model.device(switch, 32_000_000) == pytest.approx(30 + 18 + 7 * 10)
    assert model.device(switch, 32_000_000, queues=7) == model.device(switch, 32_000_000)
    mesh = Machine("", 8, "mi300x_link", mesh=True)
    assert model.device(mesh, 32_000_000) == pytest.approx(30 + 18 + 7 * 80)
    assert model.device(mesh, 32_000_000, queues=7) == pytest.approx(30 + 18 + 80)
    assert model.device(mesh, 32_000_000, queues=4) == pytest.approx(30 + 18 + 2 * 80)
    hosts = Machine("", 8, "h200", hosts=4)
    # Three of four shares come over the network, an eighth of them to each rank of a host.
    assert model.network(hosts, 32_000_000) == pytest.approx(32e6 * 3 / 4 / 8 / 25e3)
    assert model.network(switch, 32_000_000) == 0


def test_the_size_from_which_the_host_is_hidden_is_where_both_take_as_long() -> None:
    model = Model()
    for machine, queues in ((MACHINES["8xh200"], 1), (MACHINES["8xmi300x"], 7)):
        size = model.hidden_from(machine, queues)
        host = model.host(machine.ranks)
        assert model.device(machine, size, queues) == pytest.approx(host, rel=1e-3)


def measured(row: str) -> dict[int, float]:
    """Size in bytes -> us, of the first figure of the rows like `row` of what was measured."""
    text = (ROOT / "docs" / "results.md").read_text()
    text = text[: text.index("## One NVIDIA H200")] + (ROOT / "docs" / "experiments.md").read_text()
    found = re.findall(row, text, re.MULTILINE)
    return {int(number) * UNITS[unit]: float(us) for number, unit, us in found}


def test_the_measured_table_of_two_h200s_within_a_tenth_or_8_us() -> None:
    two = Machine("2x H200", 2, "h200")
    alone = measured(r"^\| (\d+) (\w+) \| in \| \**([\d.]+)\** \|")
    assert len(alone) == 6
    for size, us in alone.items():
        assert Model().device(two, size) == pytest.approx(us, rel=0.10, abs=8), size


def test_another_run_within_three_hundredths() -> None:
    two = Machine("2x H200", 2, "h200")
    alone = measured(r"^\| (64|256) (MiB) \| in place \| ([\d.]+) \|")
    assert len(alone) == 2
    for size, us in alone.items():
        assert Model().device(two, size) == pytest.approx(us, rel=0.03), size


def test_the_host_s_measured_cost_within_a_fifth() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    (us,) = re.findall(r"([\d.]+) us a 4 KiB gather from Python", text)
    assert Model().host(2) == pytest.approx(float(us), rel=0.20)


def test_the_documentation_has_what_the_command_prints() -> None:
    written = (ROOT / "docs" / "scaling.md").read_text()
    assert page(Model(), list(MACHINES), SIZES) in written


def test_nothing_gets_cheaper_with_more_ranks() -> None:
    model = Model()
    for cost in (model.handshake, model.enqueue, model.host, model.page_reads, model.alpha):
        values = [cost(n) for n in RANKS]
        assert values == sorted(set(values))


def test_the_row_of_several_hosts_has_a_copy_for_each_host_s_shard() -> None:
    model = Model(BY_HAND)
    (row,) = rows_of(model, ["hosts"], [32_000_000])
    assert row.ranks == 32
    assert row.host == pytest.approx(5 + (7 + 6 * 2) + 185)
    arrived = 32_000_000 * 31 / 32
    assert row.busbw == pytest.approx(arrived / (row.network + row.device) / 1e3)


def test_the_command_takes_other_constants(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["model", "8xh200", "--sizes", "1M", "--set", "copy_call=1", "--set", "h200=100"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is"] == "a model, not a measurement"
    assert found["constants"]["copy_call"]["value"] == 1
    assert found["constants"]["copy_call"]["source"] == "given"
    assert found["constants"]["line"]["source"] == CONSTANTS["line"].source
    (row,) = found["gathers"]
    assert row["device"] == pytest.approx(16 + 18 + 7 * (1 << 17) / 100e3)
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("This is a model, not a measurement.\n")
    assert "| `copy_call` | 1 us |" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["9xh200"], "'9xh200' is none of 8xh200, "),
        (["--set", "speed=1"], "--set: 'speed' is none of python, "),
        (["--set", "alpha=0"], "--set: alpha is 0.0, which has to be above 0"),
        (["--set", "alpha=nan"], "--set: alpha is nan"),
        (["--set", "alpha"], "'alpha' is no NAME=VALUE"),
        (["--sizes", "1T"], "'1T' is no size"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["model", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
