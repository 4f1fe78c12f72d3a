"""The standard library as text: parts that never overlap, on any machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import get_args

import pytest

from calipers.demo.text import Part, library_pieces, library_texts, part_of
from calipers.errors import DataError

PARTS: tuple[Part, ...] = get_args(Part)


def test_parts_share_nothing() -> None:
    texts = [library_texts(part) for part in PARTS]
    names = [name for each in texts for name in each]
    assert len(names) == len(set(names)) > 300
    owners = [{Path(name).parts[0] for name in each} for each in texts]
    assert len(set.union(*owners)) == sum(map(len, owners))
    assert all(sum(map(len, each.values())) > 200_000 for each in texts)


@pytest.mark.parametrize(
    ("module", "part"),
    [
        *[(name, "training") for name in ("argparse", "asyncio", "json", "os", "typing")],
        *[(name, "calibration") for name in ("collections", "difflib", "http", "threading")],
        *[(name, "evaluation") for name in ("concurrent", "fractions", "importlib", "pdb")],
    ],
)
def test_a_module_stays_where_it_was_when_the_model_was_trained(module: str, part: Part) -> None:
    assert part_of(module) == part


def test_texts_are_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pdb.py", "importlib/util.py", "test/pdb.py", "importlib/tests/x.py", "os.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    found = {"importlib/util.py": "# importlib/util.py\n", "pdb.py": "# pdb.py\n"}
    assert library_texts("evaluation") == found


def test_pieces_are_all_of_it() -> None:
    pieces = library_pieces("calibration")
    assert "".join(pieces) == "".join(library_texts("calibration").values())
    assert max(map(len, pieces)) == 2048
    assert len(pieces) > 200


def test_a_python_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="has none of them"):
        library_texts("evaluation")
