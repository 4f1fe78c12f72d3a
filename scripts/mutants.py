"""Break the source in small ways, and see whether the tests notice.

Every file ``tests/mutants/*.patch`` is one way: two lines of comment, then a diff of git ::

    # Breaks: what is wrong then
    # Tests: tests/some/test_file.py tests/that/must_notice.py

Each is applied to a clone of HEAD under ``build/mutants``, so that the working tree is never
touched; the tests it names run there and must fail. The clones and their environments stay for the
next time.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "tests" / "mutants"
CLONES = ROOT / "build" / "mutants"
NATIVE = "src/calipers/kernels/native/"
SERVER = ROOT / "scripts" / "pytest_server.py"
SETTINGS = {
    # Sources change faster than the clock by which Python tells that its bytecode is old.
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "PIP_CONSTRAINT": "constraints.txt",
    "PIP_BUILD_CONSTRAINT": "constraints.txt",
}
BUILD_TOOLS = ("nanobind", "scikit-build-core")

KILLED, TIMED_OUT, SURVIVED = "killed", "killed (timed out)", "SURVIVED"
UNAPPLIED, UNBUILT, UNTESTED = "DOES NOT APPLY", "DOES NOT BUILD", "NO TESTS RUN"
NOTICED = (KILLED, TIMED_OUT)


@dataclass(frozen=True)
class Mutant:
    """One way to break the source."""

    path: Path
    breaks: str
    tests: tuple[str, ...]
    is_native: bool

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Read the header of a patch; what follows is for git."""
        lines = path.read_text(encoding="utf-8").splitlines()
        headers = {
            key: line.removeprefix(f"# {key}:").strip()
            for line, key in zip(lines, ("Breaks", "Tests"), strict=False)
            if line.startswith(f"# {key}:")
        }
        if not headers.get("Breaks") or not headers.get("Tests"):
            fail(f"{path} must begin with the lines '# Breaks: …' and '# Tests: …'.")
        is_native = any(line.startswith(f"+++ b/{NATIVE}") for line in lines)
        return cls(path, headers["Breaks"], tuple(headers["Tests"].split()), is_native)

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.path.stem


class Clone:
    """A copy of HEAD with an environment of its own, in which one mutant at a time lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / ".venv" / "bin" / "python"
        self.log = folder.with_suffix(".log")
        self._server: subprocess.Popen[str] | None = None
        self._is_built_as_found = True

    def prepare(self) -> None:
        """Bring the clone to HEAD, and its environment up to date."""
        if not (self.folder / ".git").is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            _git(ROOT, "clone", "--quiet", "--no-checkout", str(ROOT), str(self.folder))
        _git(self.folder, "fetch", "--quiet", str(ROOT), "HEAD")
        _git(self.folder, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
        _git(self.folder, "clean", "--quiet", "-fd")
        self._must("make", "setup")
        # Here, and not in an environment that pip makes each time: its paths would be new ones,
        # and everything would be compiled again.
        missing = [tool for tool in ("cmake", "ninja") if not shutil.which(tool)]
        self._must(str(self.python), "-m", "pip", "install", "--quiet", *BUILD_TOOLS, *missing)
        self._must(*self._build)

    def open(self) -> None:
        """Start what waits for tests."""
        self._server = subprocess.Popen(
            [str(self.python), str(SERVER)],
            cwd=self.folder,
            env={**os.environ, **SETTINGS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w", encoding="utf-8"),
            text=True,
        )

    def close(self) -> None:
        """End what waits for tests."""
        if self._server is not None:
            self._server.communicate()

    def test(self, files: Sequence[str], timeout: float) -> int | None:
        """Run some files of tests, up to the first failure; return the exit code of pytest."""
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        arguments = ["-x", "-q", "--color=no", "-p", "no:cacheprovider", *files]
        print(json.dumps([timeout, arguments]), file=self._server.stdin, flush=True)
        code: int | None = json.loads(self._server.stdout.readline())
        return code

    def outcome(self, mutant: Mutant, timeout: float) -> str:
        """Apply a mutant, run the tests that must notice, and undo it."""
        if _run(["git", "apply", str(mutant.path)], self.folder).returncode:
            return UNAPPLIED
        try:
            if mutant.is_native or not self._is_built_as_found:
                self._is_built_as_found = False
                if _run(self._build, self.folder).returncode:
                    return UNBUILT
                self._is_built_as_found = not mutant.is_native
            code = self.test(mutant.tests, timeout)
        finally:
            _git(self.folder, "checkout", "--quiet", "--force", "--", ".")
        return outcome_of(code)

    @property
    def _build(self) -> list[str]:
        """The command that compiles what has changed."""
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--no-build-isolation"]
        return [*pip, "--no-deps", "--editable", "."]

    def _must(self, *command: str) -> None:
        ended = _run(command, self.folder)
        if ended.returncode:
            fail(f"{' '.join(command)} failed in {self.folder}:\n{ended.stdout}")


def outcome_of(code: int | None) -> str:
    """Say what the exit code of pytest means; None where it took too long."""
    if code is None:
        return TIMED_OUT
    return {0: SURVIVED, 4: UNTESTED, 5: UNTESTED}.get(code, KILLED)


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,
    )


def fail(problem: str) -> NoReturn:
    """End with a sentence."""
    print(problem, file=sys.stderr)
    raise SystemExit(2)


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def spread(clones: Sequence[Clone], jobs: Sequence[Callable[[Clone], None]]) -> None:
    """Let every clone take the next job until there are none."""
    free: queue.SimpleQueue[Clone] = queue.SimpleQueue()
    for clone in clones:
        free.put(clone)

    def with_free_clone(job: Callable[[Clone], None]) -> None:
        clone = free.get()
        try:
            job(clone)
        finally:
            free.put(clone)

    with ThreadPoolExecutor(len(clones)) as pool:
        list(pool.map(with_free_clone, jobs))


def untouched_times(clones: Sequence[Clone], files: Sequence[str]) -> dict[str, float]:
    """Return how long each file of tests takes; all must pass without a mutant."""
    seconds: dict[str, float] = {}

    def job(file: str) -> Callable[[Clone], None]:
        def time_file(clone: Clone) -> None:
            start = time.monotonic()
            if clone.test([file], 3600) != 0:
                fail(f"{file} fails without any mutant; see {clone.log}.")
            seconds[file] = time.monotonic() - start

        return time_file

    spread(clones, [job(file) for file in files])
    return seconds


def judged(
    clones: Sequence[Clone], mutants: Sequence[Mutant], seconds: dict[str, float]
) -> dict[str, str]:
    """Return the outcome of each mutant."""
    outcomes: dict[str, str] = {}

    def expected(mutant: Mutant) -> float:
        return sum(seconds[file] for file in mutant.tests)

    def job(mutant: Mutant) -> Callable[[Clone], None]:
        def judge(clone: Clone) -> None:
            start = time.monotonic()
            outcomes[mutant.name] = found = clone.outcome(mutant, 120 + 5 * expected(mutant))
            spent, done = time.monotonic() - start, f"{len(outcomes)}/{len(mutants)}"
            print(f"{done:>7} {spent:6.1f} s  {found:<18}  {mutant.name}: {mutant.breaks}")
            sys.stdout.flush()

        return judge

    # Those that change the kernels together, since what follows must be compiled again; then the
    # long ones, so that no clone waits for the other in the end.
    order = sorted(mutants, key=lambda mutant: (not mutant.is_native, -expected(mutant)))
    spread(clones, [job(mutant) for mutant in order])
    return outcomes


def main() -> int:
    """Judge the mutants, and list those that no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names, such as 'kernels-*'")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="how many clones work")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    given = parser.parse_args()
    mutants = [Mutant.read(path) for path in sorted(PATCHES.glob("*.patch"))]
    mutants = [mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, given.only)]
    if not mutants:
        fail(f"No mutant in {PATCHES} is called {given.only}.")
    if given.list:
        print("\n".join(f"{mutant.name}: {mutant.breaks}" for mutant in mutants))
        return 0
    start = time.monotonic()
    clones = [Clone(CLONES / str(number)) for number in range(1, given.jobs + 1)]
    try:
        with ThreadPoolExecutor(len(clones)) as pool:
            list(pool.map(Clone.prepare, clones))
        for clone in clones:
            clone.open()
        files = sorted({file for mutant in mutants for file in mutant.tests})
        print(f"{len(files)} files of tests, without any mutant …", flush=True)
        seconds = untouched_times(clones, files)
        print(f"{len(mutants)} mutants …", flush=True)
        outcomes = judged(clones, mutants, seconds)
    finally:
        for clone in clones:
            clone.close()
    ordered = dict(sorted(outcomes.items()))
    (CLONES / "outcomes.json").write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")
    noticed = [name for name, found in ordered.items() if found in NOTICED]
    minutes = (time.monotonic() - start) / 60
    print(f"\n{len(noticed)} of {len(mutants)} mutants killed, in {minutes:.0f} minutes.")
    for mutant in mutants:
        if mutant.name not in noticed:
            print(f"{ordered[mutant.name]}: {mutant.name} ({mutant.breaks})")
            print(f"    {mutant.path.relative_to(ROOT)} {' '.join(mutant.tests)}")
    return 0 if len(noticed) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
