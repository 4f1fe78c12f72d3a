"""Small checkpoints, and a process that is killed at every call while it writes one.

Run as a program, in a process without torch, which forks in no time:
``python killing.py FOLDER [old] [renames]`` prints a JSON list, what is there after each kill.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from calipers.checkpoint.output import output_folder, restore_outputs

SCRIPT = Path(__file__).parents[1] / "scripts" / "kills.py"
FILES = ("calipers.json", "config.json", "model.safetensors")
AT_ONCE = "calipers.checkpoint.output._swap_at_once"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("kills", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ), mock.patch.dict(sys.modules, kills=module):
        spec.loader.exec_module(module)
    return module


def checkpoint(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / name).write_text(json.dumps({"calipers": text}))


def write(out: Path, text: str = "new") -> None:
    with output_folder(out, overwrite=True) as journal:
        folder = journal.folder
        checkpoint(folder, text)


def state(out: Path) -> str:
    """What is there: nothing, or one checkpoint and nothing of another."""
    if not out.exists():
        return "nothing"
    found = {json.loads((out / name).read_text())["calipers"] for name in os.listdir(out)}
    return str(*found) if sorted(os.listdir(out)) == list(FILES) and len(found) == 1 else "torn"


def at_every_call(folder: Path, *, old: bool, renames: bool) -> list[list[str]]:
    """Return what was there after each kill, and after the next start; and what else there was."""
    script, found = load_script(), []
    for call in range(1000):
        place = folder / str(call)
        place.mkdir()
        (place / ".out.mine").write_text("mine")
        if old:
            checkpoint(place / "out", "old")
        with ExitStack() as stack:
            if renames:
                stack.enter_context(mock.patch(AT_ONCE, return_value=False))
            ended, _ = script.run_child(lambda out=place / "out": write(out), die_at=call)
        if ended == 0:
            return found
        assert ended == -signal.SIGKILL
        at_first = state(place / "out")
        restore_outputs(place)
        found.append([at_first, state(place / "out"), *sorted(set(os.listdir(place)) - {"out"})])
    raise AssertionError("it never ends")


if __name__ == "__main__":
    told = at_every_call(Path(sys.argv[1]), old="old" in sys.argv, renames="renames" in sys.argv)
    assert "torch" not in sys.modules
    print(json.dumps(told))
