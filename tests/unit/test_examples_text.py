"""The examples' data: bytes of real text, and batches that only seed, step and rank decide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.text import ByteBatches, load_text

COUNTING = torch.arange(200, dtype=torch.uint8)


def batches(seed: int = 0, rank: int = 0, text: torch.Tensor = COUNTING) -> ByteBatches:
    return ByteBatches(text, batch=3, seq=8, seed=seed, rank=rank, world_size=2)


def test_the_default_text_is_python_source() -> None:
    text = load_text()
    assert text.dtype == torch.uint8
    assert b"def dataclass(" in bytes(text.tolist())


def test_a_file_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)))
    assert load_text(path).tolist() == list(range(256))


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("first")
    (tmp_path / "a" / "image").write_bytes(b"\x89PNG\0\0")
    assert bytes(load_text(tmp_path).tolist()) == b"first\nsecond"


def test_what_has_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_text(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no text files"):
        load_text(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is empty"):
        load_text(tmp_path / "empty")


def test_targets_are_the_inputs_one_byte_ahead() -> None:
    inputs, targets = batches()(0)
    assert inputs.shape == targets.shape == (3, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs.diff(), torch.ones(3, 7, dtype=torch.int64))
    assert torch.equal(targets, inputs + 1)


def test_seed_step_and_rank_decide_a_batch() -> None:
    drawn, _ = batches()(5)
    assert torch.equal(drawn, batches()(5)[0])
    for other in (batches()(6), batches(seed=1)(5), batches(rank=1)(5)):
        assert not torch.equal(drawn, other[0])


def test_every_sequence_of_the_text_can_be_drawn() -> None:
    shortest = batches(text=COUNTING[:10])  # sequences of 8 and a target: two starts
    starts = {start for step in range(20) for start in shortest(step)[0][:, 0].tolist()}
    assert starts == {0, 1}


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes has no sequence of 8"):
        batches(text=COUNTING[:8])
