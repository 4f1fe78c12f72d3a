"""What a bad place for the output gets: a clear error, and what was there stays."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, token_ids
from refusals import FAMILIES, FP8, refused
from transformers import AutoModelForCausalLM

import calipers
from calipers import errors
from calipers.checkpoint import writer
from calipers.checkpoint.writer import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


# The folder


def test_an_output_folder_that_exists_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.engine.job.load_model", lambda *_, **__: pytest.fail("loaded"))
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("mine")
    text = f"The output folder '{output}' exists already. Nothing was written."
    refused(errors.CheckpointExistsError, text, build(), "W4A16", output=output)
    assert (output / "config.json").read_text() == "mine"


def test_overwriting_replaces_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    calipers.oneshot(build(), "W4A16", output_dir=output, progress=False)
    (output / "model-00001-of-00002.safetensors").touch()
    calipers.oneshot(build(), "W8A16", output_dir=output, overwrite=True, progress=False)
    assert not (output / "model-00001-of-00002.safetensors").exists()
    assert '"num_bits": 8' in (output / "config.json").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    text = "is not replaced: what is in it does not all belong to a checkpoint: thesis.txt."
    options = {"output": other, "overwrite": True}
    refused(errors.CheckpointExistsError, text, build(), "W4A16", **options)


def test_a_failed_run_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    calipers.oneshot(build(), "W4A16", output_dir=output, progress=False)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    fail_after(monkeypatch, 5)
    text = "No space left on device"
    options = {"output": output, "overwrite": True}
    refused(errors.CheckpointError, text, build(), "W8A16", **options)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.parametrize("pipeline", ["auto", "sequential"])
@pytest.mark.parametrize("holder", [".", "..", "link"])
def test_the_model_itself_is_not_overwritten(holder: str, pipeline: str, tmp_path: Path) -> None:
    source = tmp_path / "all" / "source"
    source.mkdir(parents=True)
    build().save_pretrained(source)
    (source.parent / "config.json").write_text("{}")
    (source / "link").symlink_to(source)
    output = (source / holder).resolve() if holder != "link" else source / "link"
    place = source.parent if holder == ".." else source
    text = (
        f"The output folder '{place}' would replace the model in use, '{source}'. Nothing was "
        "written. Choose another folder."
    )
    options: dict[str, Any] = {"output": output, "overwrite": True, "pipeline": pipeline}
    refused(errors.CheckpointExistsError, text, source, FP8, token_ids(), **options)
    loaded = AutoModelForCausalLM.from_pretrained(source)
    refused(errors.CheckpointExistsError, text, loaded, FP8, token_ids(), **options)
    with pytest.raises(errors.CheckpointExistsError, match=re.escape(text)):
        write_checkpoint(loaded, output, recipe="", overwrite=True)


@pytest.mark.parametrize("holder", ["source", "link"])
def test_nothing_is_written_into_the_folder_of_the_model(holder: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    build().save_pretrained(source)
    (tmp_path / "link").symlink_to(source)
    before = sorted(os.listdir(source))
    output = tmp_path / holder / "quantized"
    text = f"The output folder '{source / 'quantized'}' is inside that of the model in use"
    for model in (tmp_path / "link", source, AutoModelForCausalLM.from_pretrained(source)):
        refused(errors.CheckpointExistsError, text, model, FP8, token_ids(), output=output)
    with pytest.raises(errors.CheckpointExistsError, match="inside that of the model in use"):
        write_checkpoint(model, output, recipe="")
    assert sorted(os.listdir(source)) == before


# A full disk


def fail_after(monkeypatch: pytest.MonkeyPatch, tensors: int) -> None:
    """Let the disk be full when this many tensors are written."""
    write, count = writer.Shard._write, iter(range(10**6))

    def failing(shard: writer.Shard, name: str, tensor: torch.Tensor) -> None:
        if next(count) >= tensors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(shard, name, tensor)

    monkeypatch.setattr(writer.Shard, "_write", failing)


@FAMILIES
@pytest.mark.parametrize("tensors", [0, 7])
def test_a_disk_that_fills_up(
    tensors: int, family: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, tensors)
    text = f"Writing the checkpoint '{output}' failed: No space left on device."
    refused(errors.CheckpointError, text, build(family), FP8, token_ids(), output=output)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs a disk of its own")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small(small_disk: Path) -> None:
    text = "The checkpoint needs about 0.00"
    big = build(vocab_size=4096)
    refused(errors.CheckpointError, text, big, "W8A16", output=small_disk / "out")


def test_a_disk_that_another_program_fills(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.checkpoint.writer.free_space", lambda _: 10**12)
    text = "failed: No space left on device. What was written has been removed again"
    big = build(vocab_size=4096)
    refused(errors.CheckpointError, text, big, "W8A16", output=small_disk / "out")
