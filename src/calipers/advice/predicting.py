"""What a module would lose in a scheme, from its weight and from what was measured of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import nn

from calipers.advice.candidates import UNQUANTIZED, Candidate
from calipers.calibration.partial_forward import NewValues
from calipers.calibration.pipelines import Part
from calipers.checkpoint.compression import sizes_of_module
from calipers.engine.loop import run_parts
from calipers.engine.quantize import PreparedModel, prepare_model
from calipers.judging.activations import dynamic_error
from calipers.judging.costs import ModuleCosts
from calipers.judging.losses import decibels
from calipers.kernels.resources import FreedMemory
from calipers.measurements import Measurements
from calipers.planning.specs import COUNTS, ModuleSpec
from calipers.runtime.progress import Progress
from calipers.solvers.gptq import CurvatureCache
from calipers.statistics.value_counts import ValueCounts


@dataclass(frozen=True)
class Prediction:
    """A module in a scheme.

    :param method: how its weight is rounded: ``rtn`` or ``gptq``
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
    method: str
    error: float
    loss: float | None
    size: int
    weights: int
    seconds: float

    @property
    def choice(self) -> str:
        """The scheme, and how its weight is rounded."""
        return f"{self.scheme} {self.method}".strip()

    @property
    def decibels(self) -> float | None:
        """The error of the output in dB; None where there is none."""
        return decibels(self.error)

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.size / self.weights


class Shape(NamedTuple):
    """What is known of a module in a scheme before it is solved.

    :param size: bytes of its tensors in a checkpoint
    :param as_is: the same if nobody quantizes it
    :param weights: how many there are
    """

    size: int
    as_is: int
    weights: int


@dataclass(frozen=True)
class Trial:
    """A candidate, and a model whose modules have its scheme; solving them, it keeps errors alone.

    Errors and costs are in the solution of the model's driver.

    :param seconds: module → how long it took to solve
    """

    candidate: Candidate
    prepared: PreparedModel
    shapes: Mapping[str, Shape]
    seconds: dict[str, float] = field(default_factory=dict)
    _freed: FreedMemory = field(default_factory=FreedMemory)

    def take(self, part: Part) -> NewValues:
        """Solve a part."""
        start = time.perf_counter()
        with self.prepared.solved(part):
            for name in part.states:
                self.prepared.empty(name)
        seconds = time.perf_counter() - start
        self.seconds.update(dict.fromkeys(part.states, seconds / len(part.states)))
        self._freed.count(self.prepared.bytes_of_work(part))
        return NewValues()


def prepare_trials(
    model: str | Path,
    candidates: Sequence[Candidate],
    seen: Measurements,
    *,
    trust_remote_code: bool,
) -> list[Trial]:
    """Plan every candidate that quantizes."""
    curvatures = CurvatureCache()
    trials: list[Trial] = []
    for candidate in candidates:
        if candidate.recipe is None:
            continue
        prepared = prepare_model(
            model,
            candidate.recipe.on_float_inputs(),
            seen,
            on_unseen="weights_only",
            trust_remote_code=trust_remote_code,
            curvatures=curvatures,
        )
        network: nn.Module = prepared.model
        if trials:
            network.to("meta")  # the weights of the first are solved in all schemes
        shapes = {}
        for name in prepared.driver.solution.plan.names:
            module = network.get_submodule(name)
            assert isinstance(module, nn.Linear)
            weights, bias = module.weight.numel(), module.bias
            as_is = weights * prepared.model.dtype.itemsize + (0 if bias is None else bias.nbytes)
            shapes[name] = Shape(sum(sizes_of_module(module).values()), as_is, weights)
        trials.append(Trial(candidate, prepared, shapes))
    return trials


def predict(
    trials: Sequence[Trial], candidates: Sequence[Candidate], seen: Measurements, progress: Progress
) -> list[list[Prediction]]:
    """Solve every module in every trial, and return predictions by candidate and module."""
    with progress.counting("predicting", len(trials[0].shapes), "modules") as add:
        for part in run_parts(trials[0].prepared.read_parts(), *trials):
            add(len(part.names))
    predictions = [list(_predictions(trial, seen)) for trial in trials]
    as_is = [
        Prediction(
            each.module,
            UNQUANTIZED,
            solver="",
            method="",
            error=0.0,
            loss=None if each.loss is None else 0.0,
            size=trials[0].shapes[each.module].as_is,
            weights=each.weights,
            seconds=0.0,
        )
        for each in predictions[0]
    ]
    rows = iter(predictions)
    return [as_is if each.recipe is None else next(rows) for each in candidates]


def _predictions(trial: Trial, seen: Measurements) -> Iterator[Prediction]:
    candidate, driver = trial.candidate, trial.prepared.driver
    for spec in driver.solution.plan.modules:
        measured = driver.solution.costs.get(spec.name, ModuleCosts())
        costs = measured.with_estimates(
            driver.solution.errors[spec.name], _input_error(spec, measured, seen)
        )
        yield Prediction(
            spec.name,
            candidate.scheme_of(spec.name),
            candidate.solver,
            candidate.method,
            costs.output_error,
            costs.total_loss,
            trial.shapes[spec.name].size,
            trial.shapes[spec.name].weights,
            trial.seconds.get(spec.name, 0.0),
        )


def _input_error(spec: ModuleSpec, costs: ModuleCosts, seen: Measurements) -> float:
    """Estimate the relative error of the output by the quantized input, as if that were its own."""
    tensor = spec.tensor("input")
    if tensor is None:
        return 0.0
    if tensor.args.dynamic is False:
        static = costs.tensors.get("input")
        return 0.0 if static is None else static.error
    counts = seen.get(spec.name, "input", COUNTS)
    if not isinstance(counts, ValueCounts) or not counts.num_tokens:
        return 0.0
    (distribution,) = counts.distributions()
    return dynamic_error(distribution, tensor.args, spec.columns or 1)
