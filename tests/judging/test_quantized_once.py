"""From disk to disk a weight is rounded once: the codes that are judged are stored."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization.lifecycle import forward as library
from quantizing import IDS, model_folder, modifier

import calipers
from calipers.kernels import rounding
from calipers.solvers import scales

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "w4a16": ("W4A16", {}),
    "w4a16-optimal": ("W4A16", {"weight_observer": {"name": "optimal", "importance": "none"}}),
    "nvfp4": ("NVFP4A16", {}),
    "fp8": ("FP8_DYNAMIC", {}),
    "fp8-block": ("FP8_BLOCK", {}),
}
pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many values pass each rounding function, but for those of solvers."""
    counts: Counter[str] = Counter()
    running: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            values = kwargs["x"] if "x" in kwargs else args[0][0]
            if not running and not is_solving():
                counts[name] += values.numel()
            running.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                running.pop()

        return run

    for module, name in (
        (rounding, "pack"),
        (rounding, "_pack_in_torch"),
        (scales, "quantization_errors"),
    ):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    # Everything that compressed-tensors rounds goes through here.
    ours = counted("compressed-tensors", library._process_quantization)
    monkeypatch.setattr(library, "_process_quantization", ours)
    return counts


def is_solving() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if Path(frame.f_code.co_filename).name in ("quantization.py", "gptq.py"):
            return True
    return False


@pytest.mark.parametrize("way", ["files", "data"])
@pytest.mark.parametrize("case", CASES)
def test_once(case: str, way: str, rounded: Counter[str], tmp_path: Path) -> None:
    scheme, options = CASES[case]
    given: list[Any] = [model_folder(tmp_path / "model"), [modifier(scheme, **options)]]
    if way == "data":
        given.append(IDS)
    size = {"group_size": 32} if scheme == "W4A16" else {}
    found = calipers.oneshot(*given, output_dir=tmp_path / "out", progress=False, **size)
    # A model in memory is judged, and packed when nothing can fail any more: until then its codes
    # would take the memory of a checkpoint, which tests/test_memory_sequential.py forbids.
    times = {"files": 1, "data": 2}[way]
    assert rounded == {"pack": times * numbers_of(found)}


def test_once_to_judge_gptq(rounded: Counter[str], tmp_path: Path) -> None:
    """Later layers calibrate on what earlier ones become, as compressed-tensors works it out."""
    step = modifier("W4A16", gptq=True)
    out = {"output_dir": tmp_path / "out", "group_size": 32}
    found = calipers.oneshot(model_folder(tmp_path / "m"), [step], IDS, progress=False, **out)
    numbers = numbers_of(found)
    assert rounded == {"pack": 2 * numbers, "compressed-tensors": numbers}


def test_once_in_memory(rounded: Counter[str], tmp_path: Path) -> None:
    given = model_folder(tmp_path / "model"), [modifier("W4A16")]
    found = calipers.oneshot(*given, group_size=32, progress=False)
    assert rounded == {"pack": numbers_of(found)}


def numbers_of(found: calipers.OneshotResult) -> int:
    linears: Any = map(found.model.get_submodule, found.errors)
    return sum(module.in_features * module.out_features for module in linears)
