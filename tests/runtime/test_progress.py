"""What a person sees while data runs, and what a log file does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import small_llama

from calipers import GPTQModifier, oneshot
from calipers.runtime.progress import Add, Progress


def test_a_bar_shows_the_rate_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(shown=True).counting("calibrating", 4000, "tokens") as advance:
        advance(1000)
        advance(1500)
    shown = capsys.readouterr()
    assert "calibrating" in shown.err
    assert "2500/4000 tokens" in shown.err
    assert "tokens/s" in shown.err
    assert ":" in shown.err.rsplit("tokens/s", 1)[1]  # the time left, 0:00:01 or -:--:--
    assert not shown.out


def test_a_bar_within_another_is_gone_when_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Progress(shown=True)
    with bars.counting("calibrating", 10, "tokens") as outer:
        outer(3)
        for _ in range(2):
            with bars.counting("choosing scales", 4, "weights") as inner:
                inner(4)
        outer(7)
    shown = capsys.readouterr().err
    assert "10/10 tokens" in shown
    assert "weights" not in shown
    with bars.counting("choosing scales", 4, "weights") as alone:
        alone(4)
    assert "4/4 weights" in capsys.readouterr().err


def test_a_bar_that_fails_does_not_spoil_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    bars = Progress(shown=True)
    with pytest.raises(ZeroDivisionError), bars.counting("one", 2, "things"):
        raise ZeroDivisionError
    with bars.counting("two", 2, "things") as advance:
        advance(2)
    assert "2/2 things" in capsys.readouterr().err


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_every_pipeline_counts_all_tokens(
    pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = torch.randint(96, (40, 120))
    oneshot(small_llama(), "FP8", samples, num_calibration_samples=40, pipeline=pipeline)
    assert not capsys.readouterr().err  # nobody looks
    options: dict[str, Any] = {"num_calibration_samples": 40, "pipeline": pipeline}
    oneshot(small_llama(), "FP8", samples, progress=True, **options)
    shown = capsys.readouterr().err
    assert "4800/4800 tokens" in shown
    assert "tokens/s" in shown
    assert ("14/14 weights" in shown) == (pipeline == "basic")  # else they come with each layer


class Recorded(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(shown=False)
        self.told: list[tuple[str, float, str, list[tuple[float, str]]]] = []

    @contextmanager
    def counting(self, what: str, total: float, unit: str) -> Iterator[Add]:
        news: list[tuple[float, str]] = []
        self.told.append((what, total, unit, news))
        yield lambda number, note="": news.append((number, note))


def test_layers_that_are_solved_in_stages_are_counted_with_the_stage() -> None:
    progress = Recorded()
    samples = torch.randint(96, (40, 120))
    modifier = GPTQModifier(weights={"num_bits": 8, "strategy": "channel"}, ignore="lm_head")
    oneshot(small_llama(), modifier, samples, num_calibration_samples=40, progress=progress)
    [(_, total, unit, news)] = [told for told in progress.told if told[2] != "modules"]
    assert (total, unit) == (2, "layers")
    assert sum(number for number, _ in news) == pytest.approx(2)
    stages = ("q_proj, k_proj, v_proj", "o_proj", "gate_proj, up_proj", "down_proj")
    notes = [note for _, note in news if note]
    assert notes == [f"layer {layer}, {stage}" for layer in (1, 2) for stage in stages]


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    for bars in (Progress(), Progress(shown=False)):
        with bars.counting("calibrating", 10, "tokens") as advance:
            advance(10)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
