"""Parts that installed packages add, found by their entry points when they are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from calipers.errors import CalipersWarning, ConfigurationError
from calipers.registry import Registry, standardize


class Part:
    """What all parts derive from."""


BUILT_IN = {"own": f"{__name__}:Part"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Part.__module__])


def installed(folder: Path, package: str, code: str | None, **entries: str) -> Path:
    """Lay out a package as an installer would, with entry points of the group ``some.parts``."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {package}:{attribute}" for name, attribute in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[some.parts]", *lines]))
    if code is not None:
        (folder / f"{package}.py").write_text(code)
    return folder


def registry(**options: object) -> Registry[type]:
    return Registry("part", "some.parts", BUILT_IN, base=Part, **options)  # type: ignore[arg-type]


def test_nothing_is_imported_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from {__name__} import Part\nclass Mine(Part): ..."
    monkeypatch.syspath_prepend(installed(tmp_path, "lazy_parts", code, **{"Left-Over": "Mine"}))
    known = registry(spelling=standardize)
    assert known.names() == ["own", "left_over"]
    assert "lazy_parts" not in sys.modules
    mine = known.get("left over")
    assert (mine.__name__, known.name_of(mine), known.name_of(int)) == ("Mine", "left_over", None)
    known.add(mine, "LEFT_OVER", "other")  # it may register itself, too
    assert known.get("Other") is mine


def test_a_package_that_cannot_be_imported_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import nowhere_to_be_found"
    monkeypatch.syspath_prepend(installed(tmp_path, "broken_parts", code, broken="Mine"))
    known = registry()
    with pytest.warns(CalipersWarning, match=r"^part 'broken' \(broken_parts\.Mine of the pack"):
        assert [name for name, _ in known.parts()] == ["own"]
    assert [name for name, _ in known.parts()] == ["own"]  # silently
    with pytest.raises(ConfigurationError, match=r"broken_parts 1\.0\) cannot be used: ModuleNotF"):
        known.get("broken")


def test_what_is_not_such_a_part_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, "odd_parts", "Mine = 1", odd="Mine"))
    with pytest.raises(ConfigurationError, match=r"odd_parts 1\.0 is not a subclass of Part"):
        registry().get("odd")


@pytest.mark.parametrize("first", ["twice", "own"])
def test_a_name_stands_for_one_part(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("parts_a", "parts_b"):
        monkeypatch.syspath_prepend(installed(tmp_path / package, package, None, **{first: "Mine"}))
    other = r"parts_a\.Mine of the package parts_a 1\.0"
    whole = {"twice": rf"{other}, and parts_b\.Mine", "own": rf"Part, and {other}"}[first]
    known = registry()
    for find in (known.get, known.get, lambda _: known.names()):
        with pytest.raises(ConfigurationError, match=f"^The name .* stands for two .*{whole}"):
            find(first)
    if first != "own":
        assert known.get("own") is Part  # others can be used


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigurationError) as caught:
        registry(hint="Or a file").get("onw")
    text = "unknown part 'onw'. Did you mean 'own'? Allowed: own. Or a file."
    assert str(caught.value) == text
    assert json.loads(json.dumps(caught.value.context.as_dict()))["allowed"] == "own"
