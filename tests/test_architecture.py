"""Imports run one way: a layer may use those below it, never those above or beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import calipers

SOURCE = Path(calipers.__file__).parent

# From the ground up; packages on one line stand beside each other.
LAYERS = (
    ("errors",),
    ("numerics",),
    ("kernels",),
    ("statistics",),
    ("observers",),
    ("calibration", "measurements", "checkpoint"),
    ("modifiers",),
    ("recipes",),
    ("report", "evaluation", "integrations"),
    ("demo",),
    ("cli",),
)
FLOOR = {package: floor for floor, layer in enumerate(LAYERS) for package in layer}


def imported_packages(code: str) -> Iterator[str]:
    """The packages of Calipers that a piece of code imports, anywhere in it."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "calipers" and len(parts) > 1 and parts[1] in FLOOR:
                yield parts[1]


def wrong_edges(package: str, code: str) -> list[str]:
    return [
        other
        for other in imported_packages(code)
        if other != package and FLOOR[other] >= FLOOR[package]
    ]


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_downwards(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0]
    assert wrong_edges(package, path.read_text()) == []


def test_every_package_has_its_floor() -> None:
    assert {path.relative_to(SOURCE).parts[0] for path in FILES} <= set(FLOOR)
    imported = {edge for path in FILES for edge in imported_packages(path.read_text())}
    assert {"numerics", "statistics", "kernels"} <= imported


@pytest.mark.parametrize(
    ("package", "code", "found"),
    [
        ("numerics", "from calipers.observers import Observer", ["observers"]),
        ("statistics", "import calipers.observers.base", ["observers"]),
        ("kernels", "def f():\n    from calipers import statistics", ["statistics"]),
        ("calibration", "from calipers.checkpoint.writer import write", ["checkpoint"]),
        ("observers", "from calipers.kernels.search import search_range", []),
        ("observers", "from calipers.observers.base import Observer", []),
        ("numerics", "from calipers.errors import LayoutError\nimport torch", []),
    ],
)
def test_the_check_can_fail(package: str, code: str, found: list[str]) -> None:
    assert wrong_edges(package, code) == found


def test_importing_calipers_is_light() -> None:
    script = (
        "import torch, sys; before = set(sys.modules); import calipers; "
        "new = set(sys.modules) - before; "
        "print(len(new), 'transformers' in sys.modules, 'compressed_tensors' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    count, transformers, compressed_tensors = result.stdout.split()
    assert int(count) < 50
    assert (transformers, compressed_tensors) == ("False", "False")


def test_public_names() -> None:
    assert dir(calipers) == calipers.__all__
    for name in calipers.__all__:
        assert getattr(calipers, name) is not None
    with pytest.raises(AttributeError, match="module 'calipers' has no attribute 'nothing'"):
        calipers.nothing  # noqa: B018


def test_no_star_imports() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), path
