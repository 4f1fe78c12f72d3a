"""The files that docs/architecture.md names are those that tensors pass."""

from __future__ import annotations

import itertools
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


def chapter(title: str) -> str:
    return DOCUMENT.read_text(encoding="utf-8").split(f"### {title}\n")[1].split("\n#")[0].strip()


def described(files: list[str]) -> str:
    """Describe files as the document does: their number, and a table of packages."""
    packages: dict[str, list[str]] = {}
    for file in files:
        package, _, name = file.removesuffix(".py").partition("/")
        packages.setdefault(package, []).append(name)
    rows = [f"| `{package}/` | {', '.join(sorted(names))} |" for package, names in packages.items()]
    return "\n".join([f"{len(files)} files.", "", "| package | files |", "|---|---|", *rows])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("title", "arguments", "most"),
    [
        ("A weight that is calibrated", ["--observer", "optimal", *DATA], 37),
        ("A weight under GPTQ", ["--method", "gptq", *DATA], 45),
        ("A weight from disk to disk", ["--observer", "optimal", "--measurements"], 40),
    ],
)
def test_the_way_of_a_weight(title: str, arguments: list[str], most: int, tmp_path: Path) -> None:
    if arguments[-1] == "--measurements":
        measured = str(tmp_path / "measured.safetensors")
        call("measure", "demo", *DATA, "--output", measured)
        arguments = [*arguments, measured]
    files = files_passed(quantizing(tmp_path, *arguments))
    assert len(files) <= most, "one more file to read for who follows a weight"
    text = described(files)
    assert set(text.splitlines()) == set(chapter(title).splitlines()), f"It should say:\n{text}"
