"""The files that docs/architecture.md names are those that tensors pass."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from tracing import files_passed

from calipers.cli.main import main
from calipers.kernels import describe

DOCUMENT = Path(__file__).parent.parent / "docs" / "architecture.md"
DATA = ["--data", "demo", "--samples", "4", "--dtype", "float32"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("native" not in str(describe()), reason="other files without native"),
]


def call(*arguments: str) -> None:
    with mock.patch.object(sys, "argv", ["calipers", *arguments]), suppress(SystemExit):
        main()


def quantizing(folder: Path, *arguments: str) -> Callable[[], None]:
    numbers = itertools.count()

    def run() -> None:
        output = str(folder / str(next(numbers)))
        call("quantize", "demo", "--scheme", "W4A16", *arguments, "--output", output)
        assert (Path(output) / "model.safetensors").exists()

    return run


def documented(title: str) -> set[str]:
    """Read a table of packages, each with its files, without their ending."""
    chapter = DOCUMENT.read_text(encoding="utf-8").split(f"### {title}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)/` \| (.+) \|$", chapter, re.MULTILINE)
    return {f"{package}/{name}.py" for package, files in rows for name in files.split(", ")}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("title", "arguments"),
    [
        ("A weight that is calibrated", ["--observer", "optimal", *DATA]),
        ("A weight under GPTQ", ["--method", "gptq", *DATA]),
        ("A weight from disk to disk", ["--observer", "optimal", "--measurements"]),
    ],
)
def test_the_way_of_a_weight(title: str, arguments: list[str], tmp_path: Path) -> None:
    if arguments[-1] == "--measurements":
        measured = str(tmp_path / "measured.safetensors")
        call("measure", "demo", *DATA, "--output", measured)
        arguments = [*arguments, measured]
    assert set(files_passed(quantizing(tmp_path, *arguments))) == documented(title)
