"""The files that docs/architecture.md names are those that a weight and an activation pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import small_llama

import calipers
from calipers import oneshot

SOURCE = Path(calipers.__file__).parent
DOCUMENT = Path(__file__).parent.parent / "docs" / "architecture.md"
DECORATORS = ("statistics/locking.py", "errors/mistakes.py")
PLANNED = {
    ("recipes/schema.py", "_from_preset"),
    ("observers/spec.py", "resolve"),
}
SOLVED = {("solvers/exact.py", "_searched"), ("engine/applying.py", "apply_changes")}
WRITTEN = {("checkpoint/shards.py", "_write"), ("checkpoint/compression.py", "compressed_state")}
OF_A_WEIGHT = {("statistics/moments.py", "_summed"), ("solvers/importance.py", "weights")}
OF_AN_ACTIVATION = {("statistics/value_counts.py", "count")}


def file_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


@contextmanager
def passed_on_the_way_to(moments: set[tuple[str, str]]) -> Iterator[list[str]]:
    """Note the files of Calipers on the stack whenever one of some functions is called."""
    passed: dict[str | None, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name not in names:
            return
        if (file_of(frame), frame.f_code.co_name) in moments:
            stack = [frame]
            while stack[-1].f_back is not None:
                stack.append(stack[-1].f_back)
            passed.update(dict.fromkeys(map(file_of, reversed(stack))))

    names, found = {name for _, name in moments}, list[str]()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
    found += [file for file in passed if file is not None and file not in DECORATORS]


def documented(title: str) -> list[str]:
    chapter = DOCUMENT.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `(\S+)` \|", chapter, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(
        range(int(rows[0][0]), int(rows[0][0]) + len(rows))
    )
    return [file for _, file in rows]


def data() -> torch.Tensor:
    return torch.arange(5, 69).reshape(4, 16)


@pytest.mark.filterwarnings("ignore:The data has:calipers.errors.CalipersWarning")
def test_way_of_a_weight(tmp_path: Path) -> None:
    model, folder = small_llama(hidden_size=128), tmp_path / "checkpoint"
    with passed_on_the_way_to(PLANNED | OF_A_WEIGHT | SOLVED | WRITTEN) as passed:
        oneshot(model, "W4A16", data(), weight_observer="optimal", output_dir=folder)
    assert passed == documented("The way of a weight")
    assert len(passed) <= 21


@pytest.mark.filterwarnings("ignore:(The data has|.*static):calipers.errors.CalipersWarning")
def test_way_of_a_static_activation() -> None:
    with passed_on_the_way_to(PLANNED | OF_AN_ACTIVATION | SOLVED) as passed:
        oneshot(small_llama(), "FP8", data(), activation_observer="histogram_mse")
    first = documented("The way of a weight")[:10]
    assert passed == [*first, *documented("The way of a static activation")]
    assert len(passed) <= 17
