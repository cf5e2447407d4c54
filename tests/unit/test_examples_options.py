"""The examples' command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import train_fsdp2
from common.gpt import PRESETS
from common.options import backend_string, learning_rate, model_config
from pg_sdma.settings import read_settings


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_SDMA_INNER", "")  # so that what a test changes is put back


@pytest.mark.parametrize(
    ("transport", "device", "expected"),
    [
        ("sdma", "cpu", "cpu:sdma"),
        ("inner", "cpu", "cpu:gloo"),
        ("sdma", "cuda", "cpu:gloo,cuda:sdma"),
        ("inner", "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_the_backend_string_is_the_whole_difference(
    transport: str, device: str, expected: str
) -> None:
    assert backend_string(transport, device) == expected


def test_the_comparison_is_with_what_sdma_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_SDMA_INNER", "gloo")
    assert backend_string("inner", "cuda") == "cpu:gloo,cuda:gloo"
    train_fsdp2.parse(["--device", "cpu", "--inner-backend", "mpi"])
    assert backend_string("inner", "cpu") == "cpu:mpi"
    assert read_settings().inner_backend("cpu") == "mpi"


def test_sizes_given_replace_those_of_the_preset() -> None:
    options = train_fsdp2.parse(["--device", "cpu", "--preset", "tiny", "--layers", "7"])
    config = model_config(options)
    assert config.layers == 7
    assert (config.hidden, config.heads, config.seq) == (32, 2, PRESETS["tiny"].seq)


def test_the_rest_of_a_preset_is_kept() -> None:
    arguments = ["--device", "cpu", "--preset", "gpt2-124m"]
    assert model_config(train_fsdp2.parse(arguments)) == PRESETS["gpt2-124m"]
    shorter = model_config(train_fsdp2.parse([*arguments, "--seq", "64"]))
    assert shorter == replace(PRESETS["gpt2-124m"], seq=64)


def test_a_learning_rate_not_given_falls_with_the_width() -> None:
    small, wide, given = (
        learning_rate(train_fsdp2.parse(["--device", "cpu", *arguments]))
        for arguments in ([], ["--hidden", "1280"], ["--hidden", "1280", "--lr", "0.5"])
    )
    assert (small, wide, given) == (1e-3, 1e-4, 0.5)


def test_zero_2_is_an_option() -> None:
    assert train_fsdp2.parse(["--device", "cpu"]).reshard_after_forward
    assert not train_fsdp2.parse(
        ["--device", "cpu", "--no-reshard-after-forward"]
    ).reshard_after_forward


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "5", "--warmup", "5"], "leaves none of 5 steps"),
        (["--steps", "0"], "not a positive number"),
        (["--compare", "--save", "out"], "drop --save"),
        (["--save-every", "5"], "needs --save"),
    ],
)
def test_contradictions_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_fsdp2.parse(["--device", "cpu", *arguments])
    assert complaint in capsys.readouterr().err


def test_the_newest_complete_checkpoint_is_resumed(tmp_path: Path) -> None:
    for name in ("step-000002", "step-000010", "step-000020"):
        (tmp_path / name).mkdir()
    for name in ("step-000002", "step-000010"):
        (tmp_path / name / ".metadata").touch()
    assert train_fsdp2.newest_checkpoint(tmp_path) == tmp_path / "step-000010"
    older = tmp_path / "step-000002"
    assert train_fsdp2.newest_checkpoint(older) == older
    with pytest.raises(FileNotFoundError, match="--resume takes what --save wrote"):
        train_fsdp2.newest_checkpoint(tmp_path / "step-000020")
