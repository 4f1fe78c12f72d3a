"""Every Python block and every command of the documents runs, top to bottom, as a reader would."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from shell import run

from calipers import load_recipe
from calipers.demo.run import VARIANTS
from calipers.numerics import formats

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/measurements.md")]
DOCUMENTS += sorted((ROOT / "src").rglob("*.md"))


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(document: Path, language: str = "python") -> list[str]:
    fenced = rf"^```{language}\n(.*?)^```"
    return re.findall(fenced, document.read_text(), re.MULTILINE | re.DOTALL)


def commands(document: Path, program: str) -> list[str]:
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith(f"{program} ")]


def having(kind: str, found: Any, slow: frozenset[str] = frozenset()) -> Any:
    """Parametrize by the documents in which something is found; there must be some."""
    documents = {str(path.relative_to(ROOT)): path for path in DOCUMENTS if found(path)}
    assert documents, kind
    rows = [
        pytest.param(path, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, path in documents.items()
    ]
    return pytest.mark.parametrize("document", rows)


# Files of a package that is made up.
EXAMPLES = frozenset({"my_package/reductions.py"})

# These run whole models.
SLOW = frozenset({"README.md", "docs/measurements.md"})


@having("python", blocks, SLOW)
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write
    monkeypatch.setattr(formats, "GRIDS", dict(formats.GRIDS))  # and add a format
    namespace: dict[str, Any] = {"__name__": "document"}
    for block in blocks(document):
        exec(compile(block, str(document), "exec"), namespace)


def test_what_contributors_are_walked_through() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for walk in ("an observer", "a format", "a backend", "a step", "a check"):
        (chapter,) = re.findall(rf"^## Add {walk}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
        assert "```python" in chapter


@having("calipers", lambda document: commands(document, "calipers"), SLOW)
def test_commands_run(document: Path, tmp_path: Path) -> None:
    for line in commands(document, "calipers"):
        done = run(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout


@having("make", lambda document: commands(document, "make"))
def test_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in commands(document, "make"):
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_every_shell_line_is_tried() -> None:
    """There are no other commands in the README."""
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    tried = [*commands(ROOT / "README.md", "calipers"), *commands(ROOT / "README.md", "make")]
    assert len(lines) == len(tried) >= 5


def test_the_table_of_the_readme_is_that_of_the_demo() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    rows = [re.split(r"\s{2,}", line)[:3] for line in lines]
    first = next(index for index, row in enumerate(rows) if row[0] == "bfloat16") + 1
    assert rows[first : first + len(VARIANTS)] == [
        [each.scheme, each.method, each.observers] for each in VARIANTS
    ]


def test_yaml_blocks_are_recipes() -> None:
    found = [block for document in DOCUMENTS for block in blocks(document, "yaml")]
    assert found
    for block in found:
        assert load_recipe(block).modifiers


@pytest.mark.parametrize("document", DOCUMENTS, ids=_place)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize(
    "document", sorted({*DOCUMENTS, *(ROOT / "docs").glob("*.md")}), ids=_place
)
def test_files_and_functions_that_are_named_are_there(document: Path) -> None:
    folders = ("src", "tests", "scripts", "benchmarks")
    files = {str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    text = document.read_text()
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text):
        assert name in EXAMPLES or any(file.endswith(f"/{name}") for file in files), name
    if document.name == "judging.md":
        for module, name in re.findall(r"`([a-z_]+)\.(\w+)`", text):
            assert hasattr(import_module(f"calipers.judging.{module}"), name), f"{module}.{name}"


def test_the_reader_of_measurements_is_short_and_needs_nothing_of_calipers() -> None:
    (reader,) = (b for b in blocks(ROOT / "docs" / "measurements.md") if "safe_open" in b)
    assert len(reader.splitlines()) <= 30
    assert set(re.findall(r"^(?:import|from) (\w+)", reader, re.MULTILINE)) == {
        *("hashlib", "json", "safetensors", "torch")
    }
