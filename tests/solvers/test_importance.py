"""A new importance is one class, and one line in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import ImportanceError
from calipers.numerics.layout import Layout
from calipers.observers import MemorylessMSEObserver, Observer
from calipers.observers.options import ImportanceOptions, SearchOptions
from calipers.solvers.importance import (
    IMPORTANCES,
    Importance,
    ImportanceTarget,
    Weights,
    importance_named,
)
from calipers.statistics.base import Reduction, Statistic

ARGS = QuantizationArgs(num_bits=3, group_size=8)


class Peaks(Statistic):
    """The largest magnitude of each channel."""

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "peaks": Reduction.MAX,
        "peak_count": Reduction.SUM,
    }
    peak_count: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.peak_count) if "peak_count" in self.fields() else 0

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        tokens = x.reshape(-1, x.shape[-1]) if mask is None else x[mask]
        peaks = torch.cat([torch.zeros(1, tokens.shape[-1]), tokens.abs()]).amax(0)
        self.absorb(peaks=peaks, peak_count=torch.tensor(len(tokens)))


@dataclass(frozen=True)
class PeakImportance(Importance):
    name: ClassVar[str] = "peaks"
    kind: ClassVar[type[Statistic] | None] = Peaks

    def statistic(self, *_: object) -> Statistic | None:
        return Peaks()

    def weights(self, inputs: Statistic | None, of: ImportanceTarget) -> Weights:
        if inputs is None or not inputs.num_tokens:
            raise ImportanceError("no peaks were seen", where=of.label)
        return Weights(of.layout.over_columns(inputs.fields()["peaks"].square()))


class PeakOptions(SearchOptions, ImportanceOptions):
    """Those of a search under importance."""


class PeakObserver(MemorylessMSEObserver):
    gathers_inputs = True
    Options = PeakOptions
    usual_importance = "peaks"


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IMPORTANCES, "_sources", dict(IMPORTANCES._sources))
    IMPORTANCES.add(PeakImportance, "peaks")


def gathered(linear: torch.nn.Linear, x: Tensor) -> Observer:
    observer = PeakObserver("weight", ARGS, strict=True)
    observer.attach(linear)
    linear(x)
    observer.detach(linear)
    return observer


def test_a_new_importance() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(16, 4), torch.randn(30, 16)
    x[:, 3] *= 100
    observer = gathered(linear, x)
    assert torch.equal(linear.peaks, x.abs().amax(0))
    observer(linear.weight)
    error = (observer_error(observer, linear.weight)[:, 3]).sum()
    plain = MemorylessMSEObserver("weight", ARGS)(linear.weight)
    assert error < observer_error(plain, linear.weight)[:, 3].sum()
    second = PeakObserver("weight", ARGS, strict=True)
    assert second.gathering.take_over(linear)
    assert not hasattr(linear, "peaks")
    assert torch.equal(second(linear.weight).max_vals, observer.max_vals)


def observer_error(observer: Observer, weight: Tensor) -> Tensor:
    scale = observer.get_qparams()["scale"].repeat_interleave(8, 1)
    return ((weight / scale).round().clamp(-4, 3) * scale - weight).abs().detach()


def test_it_merges_is_saved_and_refuses() -> None:
    x = torch.randn(30, 16)
    whole, first = (gathered(torch.nn.Linear(16, 4), part) for part in (x, x[:10]))
    first.merge(gathered(torch.nn.Linear(16, 4), x[10:]))
    again = PeakObserver("weight", ARGS, strict=True)
    again.load_state_dict(first.state_dict())
    assert torch.equal(again.peaks, whole.peaks)
    with pytest.raises(ImportanceError, match=r"^Observer 'PeakObserver' \(weight\): no peaks"):
        PeakObserver("weight", ARGS, strict=True)(torch.ones(4, 16))


@pytest.mark.parametrize("name", IMPORTANCES.names())
def test_each_owns_its_statistic(name: str) -> None:
    found = importance_named(name, "ignore")
    assert (found.name, found.nonfinite) == (name, "ignore")
    statistic = found.statistic(16, ARGS)
    assert found.fields == (() if statistic is None else tuple(statistic.declared()))
    weight = torch.randn(4, 16)
    layout = Layout.of("weight", ARGS)
    of = ImportanceTarget(layout.pieces(weight), layout, "up_proj")
    if statistic is None:
        assert found.weights(None, of) == Weights()
        return
    with pytest.raises(ImportanceError, match=r"^up_proj: no importance was gathered"):
        found.weights(statistic, of)
    statistic.update(torch.tensor([[1.0] * 8 + [3.0] * 8]))
    weights = found.weights(statistic, of)
    assert weights.diagonal is not None
    assert weights.diagonal.broadcast_to(of.pieces.shape).unique().tolist() == [0.2, 1.8]
    assert (weights.hessian is None) is (name == "imatrix")
    assert found.weights(statistic, of._replace(least=0.5)).diagonal.min() == 0.5  # type: ignore[union-attr]
