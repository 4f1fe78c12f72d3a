"""The mutants are alive: what they break is there, and so are the tests that must notice."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutants  # noqa: E402

MUTANTS = mutants.read_mutants()


def test_each_breaks_one_place_in_the_source_and_names_its_tests() -> None:
    problems = [problem for mutant in MUTANTS if (problem := mutant.problem(ROOT))]
    for mutant in MUTANTS:
        for name in mutant.tests:
            file, *parts = name.split("::")
            text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
            if not text or any(not re.search(rf"(def|class) {part}\b", text) for part in parts):
                problems.append(f"{mutant.name}: there is no {name}. Name the test that notices.")
    assert not problems, "\n".join(["Correct tests/mutants/*.yaml:", *problems])
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.fixture
def mutant(tmp_path: Path) -> mutants.Mutant:
    (tmp_path / "src").mkdir()
    text = "def least(x):\n    return min(\n        x\n    )\n\n\ndef most(x):\n    return max(x)\n"
    (tmp_path / "src" / "a.py").write_text(text)
    find, less = "min( x )", "max(x)"
    return mutants.Mutant("a", "the most is the least", "src/a.py", find, less, [], "least")


def test_the_place_is_found_however_its_lines_are_broken(
    mutant: mutants.Mutant, tmp_path: Path
) -> None:
    assert mutant.problem(tmp_path) is None
    mutant.apply(tmp_path)
    assert (tmp_path / "src" / "a.py").read_text().count("return max(x)\n") == 2
    problem = mutant.problem(tmp_path) or ""
    assert "in src/a.py, least this stands 0 times" in problem
    assert "Find the line that does this now" in problem


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"symbol": "most"}, "It is in src/a.py: correct 'file' and 'symbol'."),
        ({"file": "src/old.py"}, "It is in src/a.py: correct 'file' and 'symbol'."),
        ({"symbol": None, "find": "return"}, "Make 'find' longer"),
    ],
)
def test_a_place_that_has_moved_is_looked_for(
    changes: dict[str, str | None], advice: str, mutant: mutants.Mutant, tmp_path: Path
) -> None:
    assert advice in (replace(mutant, **changes).problem(tmp_path) or "")


def test_only_tests_that_fail_have_noticed() -> None:
    codes = {1: "killed", 2: "killed", -11: "killed", None: "killed (timed out)"}
    assert {code: mutants.meaning_of(code) for code in codes} == codes
    assert [mutants.meaning_of(code) for code in (0, 4, 5)] == ["SURVIVED", *2 * ["NO TESTS RUN"]]
