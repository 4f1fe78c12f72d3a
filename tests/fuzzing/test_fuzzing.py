"""Damaged inputs of every kind, through the real commands; `make fuzz` runs many more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from fuzzing.inputs import KINDS, Case, make_sound
from fuzzing.running import run_case, run_cases

pytestmark = pytest.mark.slow

_CASES = 25
"""Of each kind; which they are does not change from run to run."""


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sound(tmp_path_factory.mktemp("fuzzing") / "sound")


@contextmanager
def only(name: str, index: int, command: str) -> Iterator[None]:
    """Let a kind have one file and one command, and no damage."""
    kind = KINDS[name][index]
    changed = replace(kind, commands=(command,), mutate=lambda content, _: content)
    with patch.dict(KINDS, {name: [changed]}):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_damaged_inputs_are_refused_or_read_as_they_are(
    name: str, sound: Path, tmp_path: Path
) -> None:
    cases = [Case(name, number) for number in range(_CASES)]
    bad = [ending for ending in run_cases(cases, sound, tmp_path) if ending.is_bad]
    assert not bad


@pytest.mark.filterwarnings("ignore")
def test_sound_inputs_are_not_refused(sound: Path, tmp_path: Path) -> None:
    """Otherwise every damage would be refused, whatever it is."""
    seen = set()
    for name, kinds in KINDS.items():
        for index, kind in enumerate(kinds):
            for command in dict.fromkeys(kind.commands):
                if (kind.file.split("/")[0], command) in seen:
                    continue
                seen.add((kind.file.split("/")[0], command))
                with only(name, index, command):
                    told = run_case(Case(name, 0), sound, tmp_path)
                assert told["outcome"] == "done", told
