"""A model that is quantized layer by layer is never in memory as a whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "layerwise.py"


@pytest.fixture(scope="module")
def layerwise() -> Any:
    spec = importlib.util.spec_from_file_location("layerwise", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_is_below_three_layers_and_activations(layerwise: Any, tmp_path: Path) -> None:
    layerwise.make_model(tmp_path / "model", 24, 768)
    measured = layerwise.measure_apart(tmp_path / "model", "sequential", "FP8 static")
    assert measured["peak"] > measured["layer"]  # something was measured
    assert measured["peak"] <= measured["limit"], measured
    assert measured["limit"] < measured["model"] / 2.5  # and the limit says something
