"""Options of `pg-sdma bench overlap` that depend on the operation."""

from __future__ import annotations

from argparse import Namespace

import pytest

from pg_sdma.cli import main, parser
from pg_sdma.cli.bench_overlap import complete

REDUCE = ("--operation", "reduce_scatter")


def completed(*given: str) -> Namespace:
    options = parser().parse_args(["bench", "overlap", *given])
    complete(options)
    return options


def test_all_gathers_are_the_default_with_all_contenders_and_models() -> None:
    options = completed()
    assert options.operation == "all_gather"
    assert options.contenders == ["sdma", "inner", "zero-cta", "low-contention", "copy"]
    assert options.models == ["gpt-7b", "gpt-70b"]


def test_reduce_scatters_leave_out_who_has_none_and_the_models() -> None:
    options = completed(*REDUCE)
    assert options.contenders == ["sdma", "inner", "copy"]
    assert options.models == []


def test_what_is_given_stays() -> None:
    assert completed("--models", "none").models == []
    assert completed("--models", "llama-70b").models == ["llama-70b"]
    options = completed(*REDUCE, "--contenders", "copy,sdma", "--models", "none")
    assert (options.contenders, options.models) == (["copy", "sdma"], [])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--contenders", "sdma,zero-cta"), "zero-cta does no reduce-scatters"),
        (("--contenders", "low-contention"), "low-contention does no reduce-scatters"),
        (("--models", "gpt-7b"), "a model's forward has no reduce-scatters"),
    ],
)
def test_what_has_no_reduce_scatters_is_refused_by_name(
    given: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "overlap", *REDUCE, *given])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_what_is_wrong_is_told_with_the_usage_of_the_subcommand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "overlap", *REDUCE, "--models", "gpt-7b"])
    assert capsys.readouterr().err.startswith("usage: pg-sdma bench overlap ")


def test_the_help_of_what_needs_gpus_speaks_of_no_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "overlap", "--help"])
    assert "CPU" not in capsys.readouterr().out
