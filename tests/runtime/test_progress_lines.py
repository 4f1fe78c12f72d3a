"""What a log file hears of a job that takes long."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, saved
from models import small_llama
from safetensors.torch import load_file

from calipers import oneshot
from calipers.checkpoint.reader import load_model, loading_counted
from calipers.cli.app import _as_json
from calipers.cli.app import progress as command_progress
from calipers.runtime.progress import Phase, Progress

NEVER = 1e6


class Log:
    """Keeps what is written, and lets a test wait for it."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self._news = threading.Condition()

    def __call__(self, phases: Sequence[Phase]) -> None:
        with self._news:
            self.lines.append([str(phase) for phase in phases])
            self._news.notify_all()

    def wait_for(self, found: Callable[[list[str]], bool]) -> list[str]:
        """Return the first line of a kind, as soon as it is there."""
        with self._news:
            assert self._news.wait_for(lambda: any(map(found, self.lines)), timeout=60)
            return next(filter(found, self.lines))


def test_a_line_says_how_far_a_phase_is_and_those_around_it() -> None:
    log = Log()
    bars = Progress(write=log, interval=0.001)
    with bars.waiting("quantizing to FP8"), bars.counting("calibrating", 4000, "tokens") as add:
        add(1000, "all is well")
        with bars.counting("choosing scales", 8, "weights"):
            outer, middle, inner = log.wait_for(lambda line: len(line) == 3)
        two = log.wait_for(lambda line: len(line) == 2 and "1,000" in line[1])
    clock = r"\d:\d\d:\d\d"
    assert re.fullmatch(f"quantizing to FP8: {clock} so far", outer)
    about = rf"{clock} so far, [\d,.]+ tokens/s, about {clock} left, all is well"
    assert re.fullmatch(f"calibrating: 1,000 of 4,000 tokens, {about}", middle)
    assert re.fullmatch(f"choosing scales: 0 of 8 weights, {clock} so far", inner)
    assert two[1].startswith("calibrating: 1,000 of 4,000 tokens")


def test_rates_and_times_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 120.0)
    phase = Phase("writing the checkpoint", began=100.0)
    assert phase.as_dict() == {"phase": "writing the checkpoint", "seconds": 20.0}
    add = phase.begin(50, "MB")
    add(10)
    assert phase.as_dict() == {
        "phase": "writing the checkpoint",
        "done": 10,
        "total": 50,
        "unit": "MB",
        "seconds": 20.0,
        "rate": 0.5,
        "seconds_left": 80.0,
    }
    said = "10 of 50 MB, 0:00:20 so far, 0.50 MB/s, about 0:01:20 left"
    assert str(phase) == f"writing the checkpoint: {said}"


def test_loading_is_counted(tmp_path: Path) -> None:
    """By the tensors in the file, and without the bars of transformers."""
    folder = saved(build(), tmp_path / "model")
    told: list[tuple[float, str]] = []
    done: list[float] = []

    def begin(total: float, unit: str) -> Any:
        told.append((total, unit))
        return lambda number, note="": done.append(number)  # noqa: ARG005

    with loading_counted(begin):
        load_model(folder)
    count = len(load_file(folder / "model.safetensors"))
    assert (told, sum(done)) == ([(count, "tensors")], count)


def test_nothing_is_written_between_phases_nor_of_short_ones() -> None:
    log = Log()
    bars = Progress(write=log, interval=NEVER)
    with bars.waiting("loading"), bars.counting("calibrating", 4, "tokens") as add:
        add(4)
    assert not log.lines
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_time_runs_on_from_one_short_phase_to_the_next() -> None:
    log = Log()
    bars = Progress(write=log, interval=0.2)
    for number in range(100_000):
        with bars.waiting(f"phase {number}"):
            pass
        if log.lines:
            break
    assert log.lines


@pytest.mark.parametrize(
    ("shown", "rank"), [(False, "0"), (None, "1")], ids=["unwanted", "another process"]
)
def test_who_does_not_speak(shown: bool | None, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    log = Log()
    bars = Progress(shown, write=log, interval=0.0)
    with bars.waiting("loading"), bars.counting("calibrating", 4, "tokens") as add:
        add(4)
    assert not log.lines


def test_a_reader_that_has_gone_away_stops_nothing() -> None:
    gone = threading.Event()

    def write(_: Any) -> None:
        gone.set()
        raise BrokenPipeError

    with Progress(write=write, interval=0.001).waiting("loading"):
        assert gone.wait(60)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_every_long_phase_of_quantizing_is_heard_of(pipeline: Any, tmp_path: Any) -> None:
    """Whatever the clock says: each phase is written the moment it begins."""
    begun: list[str] = []

    class Noting(Progress):
        def waiting(self, what: str) -> Any:
            begun.append(what)
            return super().waiting(what)

        def counting(self, what: str, total: float, unit: str) -> Any:
            begun.append(what)
            return super().counting(what, total, unit)

    samples = torch.randint(96, (4, 16))
    options: dict[str, Any] = {"pipeline": pipeline, "output_dir": tmp_path / "out"}
    with pytest.warns(UserWarning, match="samples|tokens"):
        oneshot(small_llama(), "FP8", samples, progress=Noting(interval=NEVER), **options)
    embedding = ["embedding the data"] if pipeline == "sequential" else []
    expected = ["loading the model", "reading the data", *embedding, "calibrating"]
    assert begun[: len(expected)] == expected
    assert begun[-1] == "writing the checkpoint"
    assert "choosing scales" in begun


def test_lines_are_json_where_all_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.runtime.progress.INTERVAL", 0.001)
    token = _as_json.set(True)
    written = ""
    try:
        with command_progress().counting("calibrating", 40, "tokens") as add:
            add(10)
            while "\n" not in written:
                written += capsys.readouterr().err
    finally:
        _as_json.reset(token)
    (phase,) = json.loads(written.splitlines()[0])["progress"]
    assert phase["seconds"] >= 0
    speed = [
        phase.pop(name, 0) for name in ("rate", "seconds_left")
    ]  # none before anything is done
    assert min(speed) >= 0
    assert {**phase, "done": 10.0, "seconds": 0} == {
        "phase": "calibrating",
        "done": 10.0,
        "total": 40,
        "unit": "tokens",
        "seconds": 0,
    }
