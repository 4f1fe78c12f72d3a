"""Kill ``calipers`` again and again: what it leaves is whole, and the next run tidies up.

    python scripts/kills.py --kills 100
    python scripts/kills.py --kills 50 --only measure

Half of the kills come at a random moment, half at a random one of the calls to the file system with
which the output comes to its place; some on a system that cannot exchange two folders at once.
Outputs of ``quantize`` and ``merge`` are compared to the bit, those of ``measure`` in all that does
not depend on the order of additions: counts, extrema, tokens, samples.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

Job = Callable[[], object]

_CALLS = (
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"),
    *("shutil.rmtree", "fcntl.flock", "ctypes.dlopen", "ctypes.dlsym"),
)
_AT_ONCE = "calipers.checkpoint.output._swap_at_once"


def run_child(job: Job, *, die_at: int = -1, die_after: float | None = None) -> tuple[int, int]:
    """Run a job in a fork that kills itself, and return how it ended and how many calls it made.

    Calls are counted from the first one that names the folder in which the output is made.

    :param die_at: before which call to the file system
    :param die_after: after how many seconds
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            calls = _count_calls(die_at)
            if die_after is not None:
                signal.setitimer(signal.ITIMER_REAL, die_after)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            code = _run(job)
            os.write(writer, str(calls[0]).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as told:
        calls_made = int(told.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), calls_made


def _count_calls(die_at: int) -> list[int]:
    counted = [0]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CALLS and (counted[0] or ".calipers" in str(arguments[:1])):
            if counted[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            counted[0] += 1

    sys.addaudithook(hear)
    return counted


def _run(job: Job) -> int:
    try:
        job()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@dataclass(frozen=True)
class Way:
    """One way to call the command.

    :param options: those of the command; ``{inputs}`` is the folder of files that it reads
    :param at_once: whether the system can exchange two folders at once
    """

    name: str
    options: tuple[str, ...]
    overwrite: bool
    at_once: bool = True
    command: tuple[str, ...] = ("quantize", "demo")

    def job(self, folder: Path, inputs: Path) -> Job:
        """Return the command as a function."""
        words = [*self.command, *self.options, "-o", str(folder / "out")]
        arguments = [word.format(inputs=inputs) for word in words]
        arguments += ["--overwrite"] if self.overwrite else []

        def run() -> None:
            from calipers.cli.app import app

            _be_silent()
            if self.at_once:
                app(arguments, prog_name="calipers")
            with mock.patch(_AT_ONCE, return_value=False):
                app(arguments, prog_name="calipers")

        return run


_DATA = ("--data", "demo", "--samples", "4", "--seq-len", "64")
_LAYERS = ("--scheme", "FP8", *_DATA, "--pipeline", "sequential")
_MEASURED = ("--scheme", "FP8", "--measurements", "{inputs}/first", "--max-shard-size", "100KB")
_SHARDS = ("--scheme", "NVFP4A16", "--observer", "memoryless_mse", "--max-shard-size", "50KB")
_MEASURE = ("measure", "demo")
_OFTEN = (*_DATA, "--save-every", "0")
_MERGE = ("merge", "{inputs}/first", "{inputs}/second")
WAYS = (
    Way("quantize in shards, new", _SHARDS, overwrite=False),
    Way("quantize in shards, overwrite", _SHARDS, overwrite=True),
    Way("quantize from measurements, new", _MEASURED, overwrite=False),
    Way("measure, new", _OFTEN, overwrite=False, command=_MEASURE),
    Way("measure, overwrite", _OFTEN, overwrite=True, command=_MEASURE),
    Way("merge, new", (), overwrite=False, command=_MERGE),
    Way("merge, overwrite", (), overwrite=True, command=_MERGE),
    Way("quantize W8A16, new", ("--scheme", "W8A16"), overwrite=False),
    Way("quantize W8A16, overwrite", ("--scheme", "W8A16"), overwrite=True),
    Way("quantize FP8 with data, new", ("--scheme", "FP8", *_DATA), overwrite=False),
    Way("quantize FP8 with data, overwrite", ("--scheme", "FP8", *_DATA), overwrite=True),
    Way("quantize FP8 layer by layer, overwrite", _LAYERS, overwrite=True),
    Way(
        "quantize W8A16, overwrite, no exchange",
        ("--scheme", "W8A16"),
        overwrite=True,
        at_once=False,
    ),
    Way(
        "quantize FP8, overwrite, no exchange",
        ("--scheme", "FP8", *_DATA),
        overwrite=True,
        at_once=False,
    ),
)


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def content(folder: Path) -> dict[str, str]:
    """Return what lies in a folder, at any depth, with the digests of files; or what a file has."""
    if folder.is_file():
        return measured(folder)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


def measured(file: Path) -> dict[str, str]:
    """Return what a file of measurements has, but sums, in which the order of additions shows."""
    from calipers import Measurements

    found = Measurements.load(file)
    assert found.info is not None
    tensors = {
        f"{'.'.join(place)}/{key}.{name}": value
        for place, statistics in found.tensors().items()
        for key, statistic in statistics.items()
        for name, value in statistic.fields().items()
        if not name.endswith("_sum")
    }
    digests = {name: hashlib.sha256(str(v.tolist()).encode()) for name, v in tensors.items()}
    return {"": str(found.info), **{name: digest.hexdigest() for name, digest in digests.items()}}


def check_whole(folder: Path) -> None:
    """Read all that a checkpoint holds."""
    from safetensors.torch import load_file

    if folder.is_file():
        return  # it was read as a whole
    from calipers.checkpoint.headers import stored_tensors

    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    assert json.loads((folder / "calipers.json").read_text())["calipers"]
    for file in {tensor.file for tensor in stored_tensors(folder).values()}:
        assert load_file(file)


class Place:
    """A folder with an output and its neighbours, which nobody may touch."""

    def __init__(self, folder: Path, old: Path | None) -> None:
        self.folder = folder
        (folder / ".out.notes").mkdir(parents=True)
        (folder / ".out.notes" / "new").write_text("mine")
        (folder / "config.json").write_text("{}")
        if old is not None and old.is_dir():
            shutil.copytree(old, folder / "out")
        elif old is not None:
            shutil.copyfile(old, folder / "out")
        self._neighbours = self._others()

    def _others(self) -> dict[str, str]:
        found = content(self.folder)
        ours = (".out.calipers", "out", "out.partial")
        return {name: what for name, what in found.items() if name.split("/")[0] not in ours}

    def check(self, expected: list[dict[str, str] | None]) -> int:
        """Return which of some contents the output has; other things must be as they were."""
        assert self._others() == self._neighbours, "something else was touched"
        out = self.folder / "out"
        found = content(out) if out.exists() else None
        assert found in expected, f"the output is torn: {found}"
        if found is not None:
            check_whole(out)
        return expected.index(found)

    def check_tidy(self) -> None:
        """Nothing of Calipers is left but the output."""
        left = sorted(path.name for path in self.folder.iterdir())
        assert left == [".out.notes", "config.json", "out"], left
        scratch = list(Path(tempfile.gettempdir()).glob("calipers-*"))
        assert not scratch, scratch


class Trial:
    """Kills one way of calling the command, as often as wanted."""

    def __init__(self, way: Way, inputs: Path, place: Path) -> None:
        old = inputs / ("old" if way.command[0] == "quantize" else "other")
        self.way, self._old, self._inputs, self._place = way, old, inputs, place
        first = Place(place / "first", old if way.overwrite else None)
        began = time.monotonic()
        code, self.calls = run_child(way.job(first.folder, inputs))
        self.seconds = time.monotonic() - began
        assert code == 0, f"{way.name} failed without a kill: {code}"
        first.check_tidy()
        self._new = content(first.folder / "out")

    def kill(self, chance: random.Random, number: int) -> str:
        """Kill once, check, run again, check; return what was there after the kill."""
        from calipers.checkpoint.output import restore_outputs

        place = Place(self._place / str(number), self._old if self.way.overwrite else None)
        before = content(self._old) if self.way.overwrite else None
        job = self.way.job(place.folder, self._inputs)
        if number % 2:
            code, _ = run_child(job, die_at=chance.randrange(self.calls))
        else:
            code, _ = run_child(job, die_after=chance.uniform(0, self.seconds))
        assert code in (0, -signal.SIGKILL, -signal.SIGALRM), code
        left = (place.folder / ".out.calipers").exists()
        if not self.way.at_once:
            restore_outputs(place.folder)  # what the next start does first
        found = ("old" if before else "none", "new")[place.check([before, self._new])]
        again, _ = run_child(job)
        exists = found == "new" and not self.way.overwrite
        assert again == (7 if exists else 0), again
        place.check([self._new])
        place.check_tidy()
        shutil.rmtree(place.folder)
        end = "killed" if code else "had ended"
        return f"{end}, {found} there, {'something' if left else 'nothing'} to tidy up"


def make_inputs(folder: Path) -> Path:
    """Make what commands read, and what is there before them."""
    scheme = ("--scheme", "W4A16", "--ignore", "re:.*down_proj", "--ignore", "lm_head")
    ways = {
        "old": Way("old", scheme, overwrite=False),
        "first": Way("first", _DATA, overwrite=False, command=_MEASURE),
        "second": Way("second", (*_DATA, "--skip", "4"), overwrite=False, command=_MEASURE),
        "other": Way("other", (*_DATA, "--skip", "8"), overwrite=False, command=_MEASURE),
    }
    inputs = folder / "inputs"
    inputs.mkdir()
    for name, way in ways.items():
        (folder / name).mkdir()
        assert run_child(way.job(folder / name, inputs))[0] == 0
        (folder / name / "out").rename(inputs / name)
    return inputs


def main() -> None:
    """Run the trials and count what was found; the first thing that is wrong ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="ways that begin like this")
    given = parser.parse_args()
    import calipers  # once for all children

    for name in ("oneshot", "quantize", "measure"):
        getattr(calipers, name)  # it and all it needs is imported when it is asked for
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        tempfile.tempdir = str(folder / "temporary")
        (folder / "temporary").mkdir()
        inputs = make_inputs(folder)
        chosen = [way for way in WAYS if way.name.startswith(given.only)]
        trials = [Trial(way, inputs, folder / str(i)) for i, way in enumerate(chosen)]
        found: Counter[tuple[str, str]] = Counter()
        number = kills = 0
        while kills < given.kills:
            trial = trials[(number // 2) % len(trials)]
            what = trial.kill(chance, number)
            found[trial.way.name, what] += 1
            number, kills = number + 1, kills + what.startswith("killed")
            print(f"{kills:3} {trial.way.name}: {what}", file=sys.stderr, flush=True)
    for trial in trials:
        print(f"{trial.way.name}: {trial.calls} calls, {trial.seconds:.1f} s")
        for (way, what), times in sorted(found.items()):
            if way == trial.way.name:
                print(f"  {times:3}  {what}")
    print(f"{given.kills} kills: the old or the new output was always there and whole, nothing")
    print("else was touched, and nothing was left after the next run.")


if __name__ == "__main__":
    main()
