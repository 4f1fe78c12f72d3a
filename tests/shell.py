"""The command, as a person starts it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner, Result

from calipers.cli.app import app

PROGRAM = [sys.executable, "-m", "calipers.cli.main"]


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """What a person without any settings has, and no network; None takes a variable away."""
    unset = dict.fromkeys(("NO_COLOR", "FORCE_COLOR", "COLUMNS", "RANK"))
    # Small models are no work for several threads, which wait for each other on a busy machine.
    settings = {**unset, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(changes or {})}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    return kept | {name: value for name, value in settings.items() if value is not None}


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run ``calipers`` to its end: here, where everything is imported already.

    With another environment or other options of a process, it is a process of its own.
    """
    if env or options:
        return run_apart(*arguments, cwd=cwd, env=env, **options)
    before = os.getcwd()
    try:
        os.chdir(cwd or before)
        with (
            patch.dict(os.environ, environment(), clear=True),
            # What libraries read from the environment when they were imported.
            patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
            patch("transformers.utils.logging._tqdm_active", False),
        ):
            ended = CliRunner().invoke(app, [*arguments], prog_name="calipers")
    finally:
        os.chdir(before)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return subprocess.CompletedProcess(
        [*PROGRAM, *arguments], ended.exit_code, ended.stdout, ended.stderr
    )


def refused(
    arguments: Sequence[object], *texts: str, code: int = 2, cwd: Path, **options: object
) -> None:
    """The command fails with these words, on standard error alone, and changes nothing."""
    before = sorted(cwd.rglob("*"))
    done = run(*map(str, arguments), cwd=cwd, **options)  # type: ignore[arg-type]
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    for text in texts:
        assert text in done.stderr
    for word in ("=True", "dataset=", "output_dir", "tokenizer="):
        assert word not in done.stderr
    assert sorted(cwd.rglob("*")) == before


def run_apart(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end; ``env`` are changes to the environment."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        **options,
    )


def hear_interrupts() -> None:
    """Undo what a shell does to jobs in the background; for ``preexec_fn``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command in a terminal with colours, 200 columns wide."""

    def __init__(
        self, *arguments: str, cwd: Path, env: Mapping[str, str | None] | None = None
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._shown = b""
        settings = {"TERM": "xterm-256color", "COLUMNS": "200", **(env or {})}
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            cwd=cwd,
            env=environment(settings),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=hear_interrupts,
        )
        os.close(theirs)

    def read_until(self, text: str | None) -> str:
        """Return all that was shown, when a text has appeared or, for None, at the end."""
        while text is None or text not in self._shown.decode(errors="replace"):
            try:
                self._shown += os.read(self._ours, 4096)
            except OSError:  # nobody is at the other end any more
                self.process.wait()
                break
        return self._shown.decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def run_here(*arguments: str) -> Result:
    """Run a command in this process, where everything is imported already."""
    with patch.dict(os.environ):
        return CliRunner().invoke(app, [*arguments])
