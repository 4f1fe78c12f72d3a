"""Every Python block of the documents runs, top to bottom, each document in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from calipers import load_recipe

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "src").rglob("*.md"))


def blocks(document: Path, language: str = "python") -> list[str]:
    fenced = rf"^```{language}\n(.*?)^```"
    return re.findall(fenced, document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write
    found = blocks(document)
    assert found
    namespace: dict[str, Any] = {"__name__": "document"}
    for block in found:
        exec(compile(block, str(document), "exec"), namespace)


def test_yaml_blocks_are_recipes() -> None:
    found = [block for document in DOCUMENTS for block in blocks(document, "yaml")]
    assert found
    for block in found:
        assert load_recipe(block).modifiers


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", document.read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link
