"""Many cases, each through the real command in a child process that may die or hang."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzzing.inputs import Case
from fuzzing.judging import judge, snapshot
from shell import run_here

_ROOM = 4 << 30
"""How many bytes a child may take beyond what the parent has."""
_PATIENCE = 600.0
"""How many seconds a case may take, on a machine that may be busy with others."""


@dataclass(frozen=True)
class Ending:
    """How a case ended, what was said, and how long it took."""

    case: Case
    command: str
    outcome: str
    said: str
    seconds: float

    @property
    def is_bad(self) -> bool:
        """Whether something happened that must not."""
        return self.outcome.startswith("BAD")


def run_cases(cases: Iterable[Case], sound: Path, scratch: Path) -> Iterator[Ending]:
    """Run cases one after another; a child does many, and another takes over where it dies."""
    waiting = list(cases)
    while waiting:
        for ending in _in_child([*waiting], sound, scratch):
            waiting.pop(0)
            yield ending


def _in_child(cases: list[Case], sound: Path, scratch: Path) -> Iterator[Ending]:
    """Give the endings of the first cases, until the child is done or gone."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _be_child(cases, sound, scratch, theirs)
    os.close(theirs)
    try:
        left = iter(cases)
        for line in _lines(ours):
            yield Ending(next(left), **json.loads(line))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        gone = next(left, None)
        if gone is not None:
            outcome = f"BAD: hangs or kills the process (status {status})"
            yield Ending(gone, "", outcome, "", _PATIENCE)
    finally:
        os.close(ours)


def _lines(pipe: int) -> Iterator[bytes]:
    """Give lines as they come, until there are no more or none has come for long."""
    pending = b""
    while select.select([pipe], [], [], _PATIENCE)[0]:
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return
        *whole, pending = (pending + chunk).split(b"\n")
        yield from whole


def _be_child(cases: list[Case], sound: Path, scratch: Path, pipe: int) -> None:
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, used + _ROOM))
        for case in cases:
            faulthandler.dump_traceback_later(_PATIENCE - 10)  # where a case hangs that does
            told = run_case(case, sound, scratch)
            os.write(pipe, json.dumps(told).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def run_case(case: Case, sound: Path, scratch: Path) -> dict[str, object]:
    """Run one case here."""
    folder = scratch / f"{case.kind}-{case.number}"
    folder.mkdir(parents=True)
    start = time.monotonic()
    try:
        command = case.prepare(sound, folder)
        before = snapshot(folder)
        try:
            result = run_here(*command)
            outcome, said = judge(result, folder, before, command), result.stderr
        except BaseException as error:
            outcome, said = f"BAD: escaped {type(error).__name__}: {error}", traceback.format_exc()
    finally:
        shutil.rmtree(folder)
    return {
        "command": " ".join(command).replace(f"{folder}/", ""),
        "outcome": outcome[:900],
        "said": said.replace(f"{folder}/", "")[-3000:],
        "seconds": time.monotonic() - start,
    }
