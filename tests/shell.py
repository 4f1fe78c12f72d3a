"""The real command, as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner, Result

from calipers.cli.app import app

PROGRAM = [sys.executable, "-m", "calipers.cli.main"]


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """What a person without any settings has, and no network; None takes a variable away."""
    settings = {"HF_HUB_OFFLINE": "1", "NO_COLOR": None, "COLUMNS": None, **(changes or {})}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    return kept | {name: value for name, value in settings.items() if value is not None}


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run ``calipers`` to its end; ``env`` are changes to the environment."""
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


def run_here(*arguments: str) -> Result:
    """Run a command in this process, where everything is imported already."""
    with patch.dict(os.environ):
        return CliRunner().invoke(app, [*arguments])
