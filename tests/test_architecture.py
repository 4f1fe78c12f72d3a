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

MOST_LINES = 65

# A package, or a file beside the packages, imports only from those above it.
ORDER = (
    "errors",
    "registry",
    "notebook",
    "files",
    "numerics",
    "kernels",
    "statistics",
    "runtime",
    "options",
    "solvers",
    "topology",
    "observers",
    "measurements",
    "planning",
    "calibration",
    "steps",
    "recipes",
    "judging",
    "checkpoint",
    "engine",
    "linting",
    "evaluation",
    "advice",
    "reporting",
    "demo",
    "cli",
    "__init__",
)


def imported(code: str) -> Iterator[str]:
    """The parts of Calipers that a piece of code imports: anywhere in it, and by public names."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            whole, _, rest = name.partition(".")
            part = rest.partition(".")[0]
            if whole == "calipers":
                yield calipers._HOMES.get(part, f"calipers.{part or '__init__'}").split(".")[1]


def wrong_imports(part: str, code: str) -> list[str]:
    allowed = {*ORDER[: ORDER.index(part)], part, "__version__"}
    return [other for other in imported(code) if other not in allowed]


def test_imports_run_one_way() -> None:
    parts = {
        path: path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")
    }
    assert set(parts.values()) == set(ORDER), "a package without its place, or one that is gone"
    wrong = {
        f"{path.relative_to(SOURCE)} imports {other}"
        for path, part in parts.items()
        for other in wrong_imports(part, path.read_text(encoding="utf-8"))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("part", "code", "found"),
    [
        ("numerics", "from calipers.observers import Observer", ["observers"]),
        ("statistics", "import calipers.observers.base", ["observers"]),
        ("kernels", "def f():\n    from calipers import statistics", ["statistics"]),
        ("calibration", "from calipers import oneshot", ["engine"]),
        ("calibration", "import calipers", ["__init__"]),
        ("engine", "if TYPE_CHECKING:\n    from calipers.cli import app", ["cli"]),
        ("notebook", "from calipers.numerics.formats import Format", ["numerics"]),
        ("planning", "from calipers.nowhere import anything", ["nowhere"]),
        ("observers", "from calipers.kernels.search import search_range", []),
        ("observers", "from calipers.observers.base import Observer", []),
        ("numerics", "from calipers.errors import LayoutError\nimport torch", []),
    ],
)
def test_the_check_can_fail(part: str, code: str, found: list[str]) -> None:
    assert wrong_imports(part, code) == found


@pytest.mark.slow
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


def lengths(code: str) -> dict[str, int]:
    """The lines of every function of a piece of code, with its signature and without docstring."""
    counts = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                count -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            counts[f"{node.name}, line {node.lineno}"] = count
    return counts


def test_functions_are_short() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}": count
        for path in SOURCE.rglob("*.py")
        for name, count in lengths(path.read_text(encoding="utf-8")).items()
    }
    assert {name: count for name, count in found.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("count", [MOST_LINES, MOST_LINES + 1])
def test_the_check_of_lengths_can_fail(count: int) -> None:
    head = ["class A:", "    def long(self):", '        """Say', "", '        so."""']
    body = "\n".join([*head, *["        self.x = 1"] * (count - 1)])
    assert lengths(body) == {"long, line 2": count}


def test_no_star_imports() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), path
