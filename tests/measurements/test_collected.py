"""Statistics that packages bring are collected, written and merged as those that ship."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from models import small_llama

import calipers
from calipers import Measurements
from calipers.errors import ConfigurationError
from calipers.measurements.tensors import STATISTICS
from calipers.statistics.base import Form, Reduction, Statistic, guarded

IDS = torch.arange(2 * 12).reshape(2, 12) % 31


class Peaks(Statistic):
    """The largest magnitude of each channel."""

    tokens_field = "tokens"
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "tokens": Reduction.SUM,
        "peaks": Reduction.MAX,
    }
    forms: ClassVar[Mapping[str, Form]] = {"peaks": Form.RANGE}

    @guarded
    def update(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        kept = x.detach().flatten(0, -2) if mask is None else x.detach()[mask]
        self.absorb(tokens=torch.tensor(len(kept)), peaks=kept.abs().amax(0))


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STATISTICS, "_sources", dict(STATISTICS._sources))
    STATISTICS.add(Peaks)


@pytest.mark.filterwarnings("ignore:.*static ranges from so little data")
@pytest.mark.usefixtures("_installed")
def test_the_statistic_of_a_package(tmp_path: Path) -> None:
    model, shown = small_llama(), {}
    layer = "model.layers.0.mlp.down_proj"
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda _, inputs: shown.update(x=inputs[0].detach())
    )
    with torch.no_grad():
        model(IDS)
    handle.remove()
    for name, part in (("a", IDS[:1]), ("b", IDS[1:])):
        calipers.measure(
            model,
            part,
            collect=["Peaks"],
            output_file=tmp_path / name,
            progress=False,
            num_samples=1,
        )
    merged = Measurements.load(tmp_path / "a").merge(Measurements.load(tmp_path / "b"))
    peaks = merged.tensors()[layer, "input"]["Peaks"]
    assert isinstance(peaks, Peaks)
    assert peaks.num_tokens == IDS.numel()
    torch.testing.assert_close(peaks.peaks, shown["x"].abs().flatten(0, 1).amax(0))


def test_what_nobody_brings_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="collect='Peaks' is not allowed"):
        calipers.measure(small_llama(), IDS, collect="Peaks", progress=False)
