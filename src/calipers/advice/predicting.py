"""What a module would lose in a scheme, from its weight and from what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs
from torch import nn

from calipers.advice.candidates import Candidate
from calipers.calibration.progress import Progress
from calipers.checkpoint.sizes import sizes_of_module
from calipers.measurements import Measurements
from calipers.modifiers.costs import ModuleCosts, combined_error
from calipers.numerics.formats import Format
from calipers.numerics.layout import shared_columns
from calipers.numerics.qparams import quantize_dequantize
from calipers.planning.specs import COUNTS, ModuleSpec
from calipers.quantizing import PreparedModel, prepare_model
from calipers.statistics.value_counts import Distribution, ValueCounts


@dataclass(frozen=True)
class Prediction:
    """A module in a scheme.

    :param error: relative error of its output, ‖Δy‖ / ‖y‖
    :param loss: what the loss of the model gains, in nats per token; None where sensitivity was not
        measured
    :param size: bytes of its tensors in a checkpoint
    :param weights: how many there are
    :param seconds: that solving took
    """

    module: str
    scheme: str
    solver: str
    error: float
    loss: float | None
    size: int
    weights: int
    seconds: float

    @property
    def decibels(self) -> float:
        """The error of the output in dB; −∞ where there is none."""
        return 20 * math.log10(self.error) if self.error > 0 else -math.inf

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.size / self.weights


def predict(
    model: str | Path,
    candidates: Sequence[Candidate],
    seen: Measurements,
    *,
    trust_remote_code: bool,
    progress: Progress,
) -> list[list[Prediction]]:
    """Solve every module in every candidate, and return predictions by candidate and module."""
    found: list[list[Prediction]] = []
    solved = [each for each in candidates if each.recipe is not None]
    with progress.counting("predicting", len(solved), "schemes") as add:
        for candidate in solved:
            assert candidate.recipe is not None
            prepared = prepare_model(
                model,
                candidate.recipe,
                seen,
                on_unseen="weights_only",
                trust_remote_code=trust_remote_code,
            )
            found.append(list(_predictions(prepared, candidate, seen)))
            add(1)
    as_is = [_as_it_is(prepared, each) for each in found[0]]
    rows = iter(found)
    return [as_is if each.recipe is None else next(rows) for each in candidates]


def _predictions(
    prepared: PreparedModel, candidate: Candidate, seen: Measurements
) -> Iterator[Prediction]:
    driver, seconds = prepared.driver, dict[str, float]()
    for names, taken in prepared.solved_tensors(None, Progress(False)).solved():
        seconds |= dict.fromkeys(names, taken / len(names))
    for spec in driver.solution.plan.modules:
        module = prepared.model.get_submodule(spec.name)
        costs = driver.solution.costs.get(spec.name, ModuleCosts())
        weight = driver.solution.errors[spec.name] if costs.weight is None else costs.weight
        by_input = _input_error(spec, costs, seen)
        error = combined_error(weight, by_input)
        loss = costs.loss
        if loss is not None and weight > 0:
            loss *= (error / weight) ** 2
        yield Prediction(
            spec.name,
            candidate.scheme,
            candidate.solver,
            error,
            loss,
            sum(sizes_of_module(module).values()),
            _weight(module).numel(),
            seconds.get(spec.name, 0.0),
        )


def _as_it_is(prepared: PreparedModel, other: Prediction) -> Prediction:
    """Return what a module is that nobody quantizes."""
    module = prepared.model.get_submodule(other.module)
    size = _weight(module).numel() * prepared.model.dtype.itemsize
    bias = getattr(module, "bias", None)
    size += 0 if bias is None else bias.nbytes
    loss = None if other.loss is None else 0.0
    return Prediction(other.module, "UNQUANTIZED", "", 0.0, loss, size, other.weights, 0.0)


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


# Inputs


def _input_error(spec: ModuleSpec, costs: ModuleCosts, seen: Measurements) -> float:
    """Return the relative error of the output that the quantized input causes."""
    tensor = spec.tensor("input")
    if tensor is None:
        return 0.0
    if tensor.args.dynamic is False:
        static, known = costs.tensors.get("input"), costs.input_error
        # Without what went through the module, the error of the input itself is the best guess.
        return known if known is not None else 0.0 if static is None else static.error
    counts = seen.get(spec.name, "input", COUNTS)
    if not isinstance(counts, ValueCounts) or not counts.num_tokens:
        return 0.0
    (distribution,) = counts.distributions()
    return dynamic_error(distribution, tensor.args, spec.columns or 1)


def dynamic_error(seen: Distribution, args: QuantizationArgs, columns: int) -> float:
    """Estimate the relative error of values whose scale is found while the model runs.

    Of as many independent values as share a scale, the largest is about the one that all but one of
    them stay below; scales are as if it were always that, and larger values as if they had theirs.
    """
    shared = shared_columns(args) or columns
    x, counts = seen.values.double(), seen.counts.double()
    ordered, order = x.abs().sort()
    reached = counts[order].cumsum(0)
    place = int((reached < (1 - 1 / shared) * float(reached[-1])).sum())
    largest = ordered[min(place, len(ordered) - 1)]
    if not float(largest):
        return 0.0
    fmt = Format.of(args)
    usual = x.abs() <= largest
    scale = largest / fmt.limits[1]
    error = (quantize_dequantize(x, scale, None, fmt) - x).square()
    whole = float((x.square() * counts)[usual].sum())
    return math.sqrt(float((error * counts)[usual].sum()) / whole) if whole else 0.0
