"""What a person sees while data runs, and what a log file does not."""

from __future__ import annotations

import pytest

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


def test_layers_are_gone_through_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Progress(shown=True).layers(["a", "b", "c"])) == ["a", "b", "c"]
    assert "3/3" in capsys.readouterr().err


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress().tokens(10) as advance:
        advance(10)
    assert list(Progress(shown=False).layers(["a"])) == ["a"]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
