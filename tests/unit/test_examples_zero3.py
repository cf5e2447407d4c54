"""The DeepSpeed example as far as it goes without DeepSpeed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_examples_report import INNER, SDMA, SETUP

import train_zero3
from common.markdown import comparison_page, gain_percent
from common.report import result, run_of, title
from zero3 import engine
from zero3.engine import deepspeed_config
from zero3.models import MODELS, parameter_count
from zero3.options import CONFIG, model_config, parse

CPU = ("--device", "cpu")


@pytest.mark.parametrize(
    "arguments",
    [
        "--seq 64 --batch 2 --steps 30 --warmup 3 --layers 5",
        "--seq-length 64 --batch-size 2 --num-steps 30 --warmup-steps 3 --num-layers 5",
        "--seq_length 64 --batch_size 2 --num_steps 30 --warmup_steps 3 --num_layers 5 "
        "--local_rank 1 --deepspeed",
        "--local_rank=0 --seq=64 --batch=2 --train_steps=30 --warmup=3 --layers=5",
    ],
)
def test_options_are_taken_in_the_spellings_of_deepspeeds_users(arguments):
    options = parse([*CPU, *arguments.split()])
    assert (options.batch, options.steps, options.warmup) == (2, 30, 3)
    assert model_config(options) == replace(MODELS["gpt-demo"], seq=64, layers=5)


@pytest.mark.parametrize("spelling", ["--ds-config", "--ds_config", "--deepspeed_config"])
def test_the_command_line_has_the_last_word_over_the_configuration(spelling, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(CONFIG.read_text())
    options = parse([*CPU, spelling, str(path), "--batch", "8", "--lr", "0.5", "--hpz", "2"])
    config = deepspeed_config(options, bf16=True)
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["optimizer"]["params"]["lr"] == 0.5
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 2
    options = parse([*CPU, "--stage", "1"])
    assert deepspeed_config(options, bf16=True)["zero_optimization"]["stage"] == 1


def test_the_configuration_is_zero_3_with_deepspeeds_own_buckets():
    config = deepspeed_config(parse([*CPU]), bf16=True)
    assert config["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert config["optimizer"]["type"] == "AdamW"
    assert config["bf16"] == {"enabled": True}


def test_a_device_without_bf16_trains_in_fp32():
    assert "bf16" not in deepspeed_config(parse([*CPU]), bf16=False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stage", "2", "--hpz", "2"], "not with --stage 2"),
        (["--steps", "5"], "leaves none of 5 steps"),
        (["--model", "gpt-8b"], "invalid choice: 'gpt-8b'"),
    ],
)
def test_contradictions_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        parse([*CPU, *arguments])
    assert complaint in capsys.readouterr().err


def test_the_7b_gpt_has_the_shape_that_was_published():
    config = MODELS["gpt-7b"]
    assert (config.hidden, config.layers, config.seq) == (4096, 32, 2048)
    assert 6.4e9 < parameter_count(config) < 6.5e9


def test_without_a_launcher_the_example_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --standalone"):
        train_zero3.main([*CPU])


def test_without_deepspeed_the_example_says_what_to_install(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"(?s)lacks deepspeed and transformers.*make setup-zero3"):
        train_zero3.main([*CPU, "--model", "qwen3-tiny"])


def test_a_run_comes_back_from_its_report():
    for run in (INNER, SDMA, replace(SDMA, peak_memory_bytes=2**30)):
        assert run_of(result([run], SETUP)) == run


def test_the_title_names_the_model():
    assert "Qwen3 of 869,504 parameters" in title({**SETUP, "family": "Qwen3"})


def test_the_page_has_what_was_measured():
    assert gain_percent(INNER, SDMA) == pytest.approx(20)
    page = comparison_page(INNER, SDMA, "A title", "train_zero3.py --compare")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows[0] == "| | cpu:gloo | cpu:sdma |"
    assert "| ms a step (median) | 100.0 | 80.0 |" in rows
    assert "| tokens/s, all ranks | 1,000 | 1,250 |" in rows
    assert "| time saved |  | +20.00 % |" in rows
    assert "| largest loss difference |  | 0 |" in rows
    assert "| bytes that went direct |  | 87.5% |" in rows
    assert not [row for row in rows if "memory" in row]


def test_the_page_has_the_peak_memory_where_there_is_a_device():
    runs = [replace(run, peak_memory_bytes=2**31) for run in (INNER, SDMA)]
    page = comparison_page(*runs, "A title", "train_zero3.py --compare")
    assert "| peak device memory, MiB | 2,048 | 2,048 |" in page
