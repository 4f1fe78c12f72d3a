"""Break the source in small ways, and see whether the tests notice.

``tests/mutants/*.yaml`` lists the ways, a file per package ::

    - name: numerics-int-limits
      breaks: integer formats lose their lowest code
      file: src/calipers/numerics/formats.py
      symbol: Integers.limits
      find: return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
      replace: return -(2.0 ** (self.bits - 1)) + 1, 2.0 ** (self.bits - 1) - 1
      tests: [tests/numerics/test_formats.py]

``find`` stands exactly once in the class or function ``symbol`` of the file; without a symbol, in
the file. Each mutant is applied to a clone of HEAD under ``build/mutants``, so that the working
tree is never touched; the tests it names run there, and must fail. A file stands for its tests that
are not slow; one that is slow is named itself, ``tests/test_a.py::test_b``.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests" / "mutants"
BUILD = ROOT / "build" / "mutants"
TOOLS = BUILD / "tools"
NATIVE = "src/calipers/kernels/native/cpp"
SERVER = ROOT / "scripts" / "pytest_server.py"
KILLED, TIMED_OUT, SURVIVED = "killed", "killed (timed out)", "SURVIVED"
TIMEOUT = 300  # seconds, for the tests of a mutant
UNBUILT, UNTESTED = "DOES NOT BUILD", "NO TESTS RUN"


@dataclass(frozen=True)
class Mutant:
    """One way to break the source."""

    name: str
    breaks: str
    file: str
    find: str
    replace: str
    tests: list[str]
    symbol: str | None = None

    @property
    def is_native(self) -> bool:
        """Whether the kernels must be compiled."""
        return self.file.startswith(NATIVE)

    def problem(self, root: Path) -> str | None:
        """Say why this mutant cannot be applied below a folder, and what to do; None if it can."""
        path = root / self.file
        occurrences = self._occurrences(path.read_text("utf-8")) if path.is_file() else []
        if len(occurrences) == 1:
            return None
        place = f"{self.file}" + (f", {self.symbol}" if self.symbol else "")
        what = f"{self.name}: in {place} this stands {len(occurrences)} times:\n    {self.find}\n"
        if occurrences:
            return f"{what}  Make 'find' longer, until it stands there once."
        elsewhere = [
            str(other.relative_to(root))
            for other in sorted((root / "src").rglob(f"*{path.suffix}"))
            if _pattern(self.find).search(other.read_text("utf-8"))
        ]
        if elsewhere:
            return f"{what}  It is in {', '.join(elsewhere)}: correct 'file' and 'symbol'."
        return (
            f"{what}  Find the line that does this now, and write 'find' and 'replace' so that"
            f" {self.breaks}. Where nothing does it any more, delete the mutant."
        )

    def apply(self, root: Path) -> None:
        """Break the source below a folder."""
        path = root / self.file
        text = path.read_text("utf-8")
        ((start, end),) = self._occurrences(text)
        path.write_text(text[:start] + self.replace + text[end:], "utf-8")

    def _occurrences(self, text: str) -> list[tuple[int, int]]:
        start, end = 0, len(text)
        if self.symbol is not None:
            start, end = dict(_symbols(text)).get(self.symbol, (0, 0))
        return [place.span() for place in _pattern(self.find).finditer(text, start, end)]


def _pattern(find: str) -> re.Pattern[str]:
    """Return what finds a piece of source however its lines are broken and indented."""
    return re.compile(r"\s+".join(map(re.escape, find.split())))


def _symbols(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the classes and functions of a file of Python, and where they begin and end."""
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(mark.lineno for mark in child.decorator_list)])
                name = f"{prefix}{child.name}"
                yield name, (offsets[first - 1], offsets[child.end_lineno or first])
                yield from within(child, f"{name}.")
            else:
                yield from within(child, prefix)

    return within(ast.parse(text), "")


def read_mutants(folder: Path = MUTANTS) -> list[Mutant]:
    """Read all lists of mutants."""
    return [
        Mutant(**entry)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text("utf-8"))
    ]


@dataclass
class Clone:
    """A copy of HEAD in which one mutant at a time lives, and a server that runs its tests."""

    folder: Path
    _server: subprocess.Popen[str] | None = field(default=None, repr=False)
    _is_built_as_found: bool = False

    @property
    def log(self) -> Path:
        """Where the output of the tests is."""
        return self.folder.with_suffix(".log")

    def prepare(self) -> None:
        """Bring the clone to HEAD, compile its kernels, and start its server.

        Its environment has the packages of this one, but Calipers from the clone.
        """
        if not (self.folder / ".git").is_dir():
            _run(["git", "clone", "--quiet", "--no-checkout", ROOT, self.folder], ROOT)
        _run(["git", "fetch", "--quiet", str(ROOT), "HEAD"], self.folder)
        _run(["git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], self.folder)
        _run(["git", "clean", "--quiet", "-fd"], self.folder)
        environment = self.folder / ".venv"
        venv.create(environment, symlinks=True)
        paths = {"base": str(environment), "platbase": str(environment)}
        packages = [path for path in sys.path if path.endswith("site-packages")]
        listed = "\n".join([str(self.folder / "src"), *packages, ""])
        Path(sysconfig.get_path("purelib", vars=paths), "clone.pth").write_text(listed, "utf-8")
        self.build()
        self._is_built_as_found = True
        self._server = subprocess.Popen(
            [str(environment / "bin" / "python"), str(SERVER)],
            cwd=self.folder,
            # Sources change faster than the clock by which Python tells that bytecode is old.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w", encoding="utf-8"),
            text=True,
        )

    def build(self) -> None:
        """Compile what has changed in the kernels."""
        objects = self.folder / "build" / "native"
        if not (objects / "build.ninja").exists():
            nanobind = f"-Dnanobind_DIR={TOOLS / 'nanobind' / 'cmake'}"
            python = f"-DPython_EXECUTABLE={sys.executable}"
            _run(["cmake", "-GNinja", "-S", NATIVE, "-B", objects, nanobind, python], self.folder)
        _run(["cmake", "--build", objects], self.folder)
        for module in objects.glob("_native*"):
            shutil.copy2(module, self.folder / "src" / "calipers" / "kernels")

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.communicate()

    def test(self, tests: Sequence[str], timeout: float) -> str:
        """Run some tests, up to the first failure, and say what that means for a mutant."""
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        chosen = ["-m", "not slow"] if all(test.endswith(".py") for test in tests) else []
        arguments = ["-x", "-q", "--color=no", "-p", "no:cacheprovider", *chosen, *tests]
        print(json.dumps([timeout, arguments]), file=self._server.stdin, flush=True)
        return meaning_of(json.loads(self._server.stdout.readline()))

    def outcome(self, mutant: Mutant) -> str:
        """Apply a mutant, run the tests that must notice, and undo it."""
        mutant.apply(self.folder)
        try:
            if mutant.is_native or not self._is_built_as_found:
                self._is_built_as_found = False
                self.build()
                self._is_built_as_found = not mutant.is_native
            return self.test(mutant.tests, TIMEOUT)
        except subprocess.CalledProcessError:
            return UNBUILT
        finally:
            _run(["git", "checkout", "--quiet", "--force", "--", "."], self.folder)


def meaning_of(code: int | None) -> str:
    """Say what the exit code of pytest means for a mutant; None where it took too long."""
    return {None: TIMED_OUT, 0: SURVIVED, 4: UNTESTED, 5: UNTESTED}.get(code, KILLED)


def _run(command: Sequence[str | Path], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def judge(clones: Sequence[Clone], mutants: Sequence[Mutant]) -> dict[str, str]:
    """Return the outcome of each mutant; every clone takes the next until there are none."""
    outcomes: dict[str, str] = {}
    # Those that change the kernels together, since what follows must be compiled again.
    left = iter(sorted(mutants, key=lambda mutant: not mutant.is_native))

    def work(clone: Clone) -> None:
        for mutant in left:
            start = time.monotonic()
            outcomes[mutant.name] = outcome = clone.outcome(mutant)
            spent, done = time.monotonic() - start, f"{len(outcomes)}/{len(mutants)}"
            line = f"{done:>7} {spent:6.1f} s  {outcome:<18}  {mutant.name}: {mutant.breaks}"
            print(line, flush=True)

    with ThreadPoolExecutor(len(clones)) as pool:
        list(pool.map(work, clones))
    return outcomes


def check_untouched(clones: Sequence[Clone], mutants: Sequence[Mutant]) -> None:
    """See that the tests pass without any mutant."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = [test for test in tests if test.endswith(".py")]
    slow = [test for test in tests if test not in files]

    def run(clone: Clone, number: int) -> None:
        for kind in (files, slow):
            part = kind[number :: len(clones)]
            if part and clone.test(part, 3600) != SURVIVED:
                raise SystemExit(f"Tests fail without any mutant; see {clone.log}.")

    with ThreadPoolExecutor(len(clones)) as pool:
        list(pool.map(run, clones, range(len(clones))))
    print("All tests pass without any mutant.", flush=True)


def main() -> int:
    """Judge the mutants, and list those that no test noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names, such as 'kernels-*'")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="how many clones work")
    given = parser.parse_args()
    mutants = [each for each in read_mutants() if fnmatch.fnmatch(each.name, given.only)]
    if not mutants:
        raise SystemExit(f"No mutant in {MUTANTS} is called {given.only}.")
    start = time.monotonic()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(TOOLS)]
    if not (TOOLS / "nanobind").is_dir():
        _run([*pip, "nanobind"], ROOT)
    clones = [Clone(BUILD / str(number)) for number in range(1, given.jobs + 1)]
    try:
        for clone in clones:
            clone.prepare()
        problems = [problem for each in mutants if (problem := each.problem(clones[0].folder))]
        if problems:
            raise SystemExit("\n".join(problems))
        check_untouched(clones, mutants)
        outcomes = judge(clones, mutants)
    finally:
        for clone in clones:
            clone.close()
    alive = [each for each in mutants if outcomes[each.name] not in (KILLED, TIMED_OUT)]
    minutes = (time.monotonic() - start) / 60
    print(f"\n{len(mutants) - len(alive)} of {len(mutants)} killed, in {minutes:.0f} minutes.")
    for mutant in alive:
        print(f"{outcomes[mutant.name]}: {mutant.name} ({mutant.breaks}) {' '.join(mutant.tests)}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
