from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints that lint looks at are made, each once."""
    return tmp_path_factory.mktemp("lint")
