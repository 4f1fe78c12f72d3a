"""Ctrl-C at any moment: one line, the right exit code, and nothing half-written."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from families import build, saved
from shell import PROGRAM, Terminal, environment, hear_interrupts
from words import byte_tokenizer

pytestmark = pytest.mark.slow

LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
PATIENCE = 120.0
W8A16 = ("--scheme", "W8A16", "-o", "out")


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(moment: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Look again and again, until it is so or the process has ended."""
    end = time.monotonic() + PATIENCE
    while process.poll() is None and not moment():
        assert time.monotonic() < end
        time.sleep(0.0005)


def has_begun(process: subprocess.Popen[str]) -> bool:
    """Whether Python runs and our answer to signals is in place."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def has_mapped(process: subprocess.Popen[str], library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


def check_done(shown: str, folder: Path) -> None:
    assert "Written to out" in shown
    assert (folder / "out" / "config.json").exists()
    assert [path.name for path in folder.iterdir()] == ["out"]


def check_interrupted(process: subprocess.Popen[str], folder: Path) -> None:
    """One line, and nothing left; if the end came first, everything is there."""
    shown, said = process.communicate(timeout=PATIENCE)
    if process.returncode == 0:
        check_done(shown, folder)
        return
    assert (process.returncode, shown) == (130, "")
    assert said == "Interrupted. Nothing half-written is left.\n"
    assert list(folder.iterdir()) == []


@LINUX
@pytest.mark.parametrize("library", [None, "libtorch_cpu", "safetensors_rust"])
def test_while_modules_are_imported(library: str | None, model: Path, tmp_path: Path) -> None:
    with started("quantize", str(model), *W8A16, cwd=tmp_path) as process:
        wait_until(lambda: has_begun(process), process)
        if library is not None:
            wait_until(lambda: has_mapped(process, library), process)
        process.send_signal(signal.SIGINT)
        check_interrupted(process, tmp_path)


def test_while_data_runs_through_the_model(model: Path, text: Path, tmp_path: Path) -> None:
    """The progress bar tells when."""
    arguments = ("--scheme", "FP8", "--data", str(text), "--seq-len", "64", "-o", "out")
    with Terminal("quantize", str(model), *arguments, cwd=tmp_path) as terminal:
        terminal.read_until("calibrating")
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.read_until(None)
    if terminal.process.returncode == 0:  # a busy machine has kept the signal waiting
        check_done(shown, tmp_path)
        return
    assert terminal.process.returncode == 130
    assert shown.rstrip().endswith("Interrupted. Nothing half-written is left.")
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes some time to write."""
    model = build("llama", torch.bfloat16, vocab_size=60_000)
    folder = saved(model, tmp_path_factory.mktemp("large"))
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_the_checkpoint_is_written(
    number: signal.Signals, large: Path, tmp_path: Path
) -> None:
    with started("quantize", str(large), *W8A16, cwd=tmp_path) as process:
        wait_until(lambda: any((tmp_path / ".out.calipers/new").glob("model*")), process)
        process.send_signal(number)
        if number == signal.SIGINT:
            check_interrupted(process, tmp_path)
            return
        process.communicate(timeout=PATIENCE)
        assert process.returncode in (0, 128 + signal.SIGTERM)
        left = [path.name for path in tmp_path.iterdir()]
        assert left == (["out"] if process.returncode == 0 else [])
