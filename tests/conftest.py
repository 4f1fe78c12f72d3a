from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from calipers.kernels import describe
from calipers.kernels.native import SWITCH
from calipers.observers import Observer

if describe().instruction_set is None:
    os.environ[SWITCH] = "0"  # without a compiler the tests pass too; what was not built is no news

os.environ.pop("COLUMNS", None)  # of a terminal, or of xdist; who writes to a pipe has no width

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes, each with a core of its own
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for those that tests start

# The machine is noisy: no test depends on how long something takes.
settings.register_profile(
    "calipers", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("calipers")


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Observers that a test registers are gone afterwards: others list all there are."""
    registry = Observer.registry
    classes, aliases = dict(registry._classes), dict(registry._aliases)
    yield
    registry._classes, registry._aliases = classes, aliases


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder that does not exist, in one that does not exist either."""
    return tmp_path / "place" / "out"
