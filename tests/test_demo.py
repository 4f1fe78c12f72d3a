"""What a newcomer runs first."""

from __future__ import annotations

import os
import subprocess
import sys

from calipers.observers import Observer


def test_the_demo_shows_every_observer() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "calipers.demo"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert run.returncode == 0, run.stderr
    missing = [name for name in own_names() if name not in run.stdout]
    assert not missing


def own_names() -> list[str]:
    """Other tests may have registered classes of theirs."""
    names = Observer.registered_names()
    modules = {name: Observer.get_value_from_registry(name).__module__ for name in names}
    return [name for name, module in modules.items() if module.startswith("calipers.")]
