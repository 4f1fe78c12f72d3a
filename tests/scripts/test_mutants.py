"""The mutants are alive: what they break is there, and so are the tests that must notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutants  # noqa: E402

PATCHES = sorted(mutants.PATCHES.glob("*.patch"))


def test_each_breaks_something_in_the_source_and_names_its_tests() -> None:
    assert len(PATCHES) >= 80
    for path in PATCHES:
        mutant = mutants.Mutant.read(path)
        assert all((ROOT / file).is_file() for file in mutant.tests), path
        assert mutant.is_native == ("/native/" in path.read_text()), path
        checked = subprocess.run(
            ["git", "apply", "--check", "--include=src/*", str(path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert checked.returncode == 0, f"{path.name} must be made anew: {checked.stderr}"


@pytest.mark.parametrize("text", ["", "# Breaks: all\n", "# Tests: a.py\n# Breaks: all\n"])
def test_a_patch_without_its_header_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.patch").write_text(text + "diff --git a/x b/x\n")
    with pytest.raises(SystemExit):
        mutants.Mutant.read(tmp_path / "x.patch")
    assert "must begin with the lines" in capsys.readouterr().err


class Scripted(mutants.Clone):
    """A clone in which tests end as told."""

    def __init__(self, codes: dict[str, int | None]) -> None:
        super().__init__(Path("nowhere"))
        self._codes = codes

    def outcome(self, mutant: mutants.Mutant, timeout: float) -> str:
        assert timeout > 100
        return mutants.outcome_of(self._codes[mutant.name])


def test_what_is_noticed_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {"fails": 1, "breaks-imports": 2, "crashes": -11, "hangs": None, "passes": 0, "gone": 4}
    given = [mutants.Mutant(Path(f"{name}.patch"), "all", ("a.py",), False) for name in codes]
    outcomes = mutants.judged([Scripted(codes), Scripted(codes)], given, {"a.py": 1.0})
    noticed = {name for name, found in outcomes.items() if found in mutants.NOTICED}
    assert noticed == {"fails", "breaks-imports", "crashes", "hangs"}
    assert outcomes["hangs"] == "killed (timed out)"
    assert outcomes["gone"] == "NO TESTS RUN"
    assert capsys.readouterr().out.count("\n") == len(codes)
