"""What a person sees while data runs, and what a log file does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import small_llama

from calipers import oneshot
from calipers.calibration.progress import Progress


def test_tokens_show_the_rate_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(shown=True).tokens(4000) as advance:
        advance(1000)
        advance(1500)
    shown = capsys.readouterr()
    assert "2500/4000 tokens" in shown.err
    assert "tokens/s" in shown.err
    assert ":" in shown.err.rsplit("tokens/s", 1)[1]  # the time left, 0:00:01 or -:--:--
    assert not shown.out


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


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress().tokens(10) as advance:
        advance(10)
    with Progress(shown=False).tokens(10) as advance:
        advance(10)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
