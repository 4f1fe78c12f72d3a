"""The modifier that learns how to round, a decoder layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from calipers.calibration.layer_stream import LayerStream
from calipers.errors import ConfigurationError
from calipers.numerics.qparams import fake_quantize
from calipers.observers import QParamsDict
from calipers.planning.plan import Propagation, StepPlan
from calipers.planning.specs import TensorSpec
from calipers.solvers.rounding import Adam, Offsets, RelaxedWeight, squared_error
from calipers.steps.base import Changes, Layer
from calipers.steps.gptq import GPTQModifier, rounding_by, with_scales

_HELD_OUT = 5  # one batch of so many is held out
_CHECKS = 8  # looks at held-out samples, of which
_PATIENCE = 3  # may pass in a row without an improvement
_REACH = 0.5  # codes that offsets can move in all steps: where all gradients agree, a code flips
_SCALE_RATE = 0.0005  # at first, of scales, as a part of themselves
_SEED = 0

_PASSED_OVER = ("enable_torch_compile", "disable_opt_rtn")

KEPT = "rounded with error feedback: learned rounding loses no less on held-out samples"
NOT_FINITE = "rounded with error feedback: a gradient of learned rounding is not finite"
NOTHING_HELD_OUT = "rounded with error feedback: one batch of samples leaves none to hold out"
NO_STREAM = "rounded with error feedback: learned rounding needs data that runs"

Place = tuple[str, str]


class AutoRoundModifier(GPTQModifier):
    """Quantizes as :class:`GPTQModifier` does, then improves each decoder layer as a whole.

    Codes and scales of all weights of a layer are moved by gradient descent, so that the layer
    gives what the float layer gives, on the calibration data. A fifth of the batches is held out.
    What loses least on them is kept: the start, if nothing loses less.

    :param iters: how many steps are made at most
    :param lr: how far a step moves a code at first, in codes; it falls to 0. ``null``: 1 /
        ``iters``, with which a code changes if nearly all gradients agree
    :param batch_size: how many samples a step sees at least; batches are never cut
    :param device_ids: ``null``: gradients are computed where the model is

    >>> AutoRoundModifier(scheme="W4A16", ignore="lm_head", iters=100).iters
    100
    """

    method: ClassVar[str] = "rounding"
    runs_layers: ClassVar[bool] = True

    iters: int = 200
    lr: Annotated[float, Field(gt=0, le=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 8
    device_ids: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _settle_keys_of_autoround(cls, given: Any) -> Any:
        """Pass over keys of llm-compressor that change no result here."""
        return {key: value for key, value in given.items() if key not in _PASSED_OVER}

    @field_validator("iters")
    @classmethod
    def _has_steps(cls, iters: int) -> int:
        if iters < 1:
            raise ConfigurationError(
                "must be a whole number from 1: without a step nothing is learned",
                got=str(iters),
                hint="Leave it out for 200, or use GPTQModifier, from which learning starts",
            )
        return iters

    @field_validator("device_ids")
    @classmethod
    def _has_one_device(cls, device_ids: str | None) -> None:
        if device_ids is not None:
            raise ConfigurationError(
                "must be null: a layer computes on one device",
                got=repr(device_ids),
                hint="Leave it out, and start a process for each device with torchrun",
            )

    @field_validator("error_propagation")
    @classmethod
    def _has_targets(cls, propagation: Propagation) -> Propagation:
        if propagation == "quantized":
            raise ConfigurationError(
                "must be 'both', or 'float' where no data runs: layers learn to give what those of "
                "the float model give",
                got=repr(propagation),
                hint="Leave it out",
            )
        return propagation

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:
        """Say which modules of a model this modifier quantizes, and what it needs for that."""
        planned = super().plan(model, step)
        return StepPlan(
            planned.modules,
            planned.measured,
            planned.propagation,
            planned.changed,
            tunes_layers=self.error_propagation == "both",
        )

    def solve(self, layer: Layer) -> Changes:
        """Find what learning starts from: parameters, and weights by error feedback."""
        solved = super().solve(layer)
        if self.error_propagation == "both":
            return solved
        names = [module.name for module in layer.modules if module.tensor("weight")]
        return solved.joined(Changes(notes=dict.fromkeys(names, NO_STREAM) | dict(solved.notes)))

    def tune(self, layer: Layer, stream: LayerStream) -> Changes:
        """Learn how the weights of a decoder layer are rounded."""
        with layer.ranks.step(f"learning how {stream.name} is rounded", together=True):
            weights = tuple(_weights_of(layer, stream.device))
            if not weights:
                return Changes()
            parts = _divided(layer, stream)
            if parts is None:
                return Changes(notes={stream.name: NOTHING_HELD_OUT})
            with stream.at_work():
                return self._learn(_Learner(layer, stream, weights, *parts))

    def _learn(self, learner: _Learner) -> Changes:
        """Return what loses least on held-out samples: one of the states on the way, or nothing."""
        weights, ranks = learner.weights, learner.layer.ranks
        rates = (2 * _REACH / self.iters if self.lr is None else self.lr, _SCALE_RATE)
        moving = [(p, r) for w in weights for p, r in zip(w.offsets, rates, strict=True)]
        moving = [(parameter, rate) for parameter, rate in moving if parameter.requires_grad]
        parameters, rates_of = zip(*moving, strict=True)
        optimizer = Adam(parameters, rates_of)
        best, least, since = Changes(), learner.held_out_error(), 0
        samples = learner.samples(self.batch_size)
        interval = max(1, self.iters // _CHECKS)
        progress = learner.layer.progress
        with progress.counting("learning how to round", self.iters, "steps") as add:
            for step in range(self.iters):
                ranks.check()
                gradients = learner.gradients(next(samples), parameters)
                if gradients is None:
                    return Changes(notes={learner.stream.name: NOT_FINITE})
                optimizer.step(gradients, 1 - step / self.iters)
                for weight in weights:
                    weight.relaxed.confine_(weight.offsets)
                add(1)
                if (step + 1) % interval and step + 1 < self.iters:
                    continue
                found, since = learner.changes(), since + 1
                error = learner.held_out_error(found)
                if error < least:
                    best, least, since = found, error, 0
                if since == _PATIENCE:
                    break
        return best if best.qparams else Changes(notes={learner.stream.name: KEPT})


@dataclass(frozen=True)
class _Weight:
    """A weight that learns.

    :param values: what it was rounded to
    """

    name: str
    spec: TensorSpec
    values: Tensor
    qparams: QParamsDict
    relaxed: RelaxedWeight
    offsets: Offsets

    def changes(self) -> Changes:
        """Return what it has become, as it is stored; nothing where it has not changed."""
        with torch.no_grad():
            values = self.relaxed.weight(self.offsets).to(self.values)
            scales = self.relaxed.moved_scales(self.offsets)
        place, args = (self.name, "weight"), self.spec.args
        qparams = with_scales(self.qparams, args, scales)
        if torch.equal(values, self.values):
            return Changes()
        return Changes({place: qparams}, {place: values})


@dataclass(frozen=True)
class _Learner:
    """The weights of a layer, and what they lose: sums over the batches of all processes.

    :param training: the batches of this process that are learned from
    :param held_out: its other ones
    """

    layer: Layer
    stream: LayerStream
    weights: tuple[_Weight, ...]
    training: Sequence[int]
    held_out: Sequence[int]

    def samples(self, count: int) -> Iterator[list[int]]:
        """Yield batches with so many samples at least, again and again in another order."""
        generator = torch.Generator().manual_seed(_SEED)
        waiting: list[int] = []
        while True:
            step: list[int] = []
            while self.training and sum(map(self.stream.samples, step)) < count:
                if not waiting:
                    order = torch.randperm(len(self.training), generator=generator)
                    waiting = [self.training[index] for index in order]
                step.append(waiting.pop())
            yield step

    def gradients(
        self, batches: Sequence[int], parameters: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Return the gradients of the error per token; None where one is not finite."""
        with torch.enable_grad():
            weights = [each.relaxed.weight(each.offsets) for each in self.weights]
            leaves = [weight.detach().requires_grad_() for weight in weights]
            places = [(each.name, "weight") for each in self.weights]
            sums = [torch.zeros_like(leaf) for leaf in leaves]
            tokens = 0
            for batch in batches:
                targets = self.stream.target(batch)
                outputs = self.stream.outputs(batch, dict(zip(places, leaves, strict=True)))
                error = squared_error(outputs, targets)
                # Experts that no token of a batch has reached have no gradient.
                found = torch.autograd.grad(error, leaves, allow_unused=True)
                for total, gradient in zip(sums, found, strict=True):
                    if gradient is not None:
                        total += gradient
                tokens += len(targets)
            everyone = self.layer.ranks.share((tokens, sums))
            count = max(1, sum(tokens for tokens, _ in everyone))
            means = [
                torch.stack([theirs.to(own) for theirs in each]).sum(0) / count
                for own, each in zip(sums, zip(*(s for _, s in everyone), strict=True), strict=True)
            ]
            if not all(bool(torch.isfinite(mean).all()) for mean in means):
                return None
            gradients = torch.autograd.grad(weights, parameters, means)
        return list(gradients)

    def changes(self) -> Changes:
        """Return what the weights have become."""
        changes = Changes()
        for weight in self.weights:
            changes = changes.joined(weight.changes())
        return changes

    @torch.no_grad()
    def held_out_error(self, changes: Changes | None = None) -> float:
        """Return the error of the stored weights on held-out batches, ‖output − target‖².

        :param changes: to the weights; None: none
        """
        changes = changes or Changes()
        tensors = {}
        for weight in self.weights:
            place = weight.name, "weight"
            values = changes.tensors.get(place, weight.values)
            qparams = changes.qparams.get(place, weight.qparams)
            tensors[place] = fake_quantize(values, args=weight.spec.args, **qparams)
        error = 0.0
        for batch in self.held_out:
            self.layer.ranks.check()
            outputs = self.stream.outputs(batch, tensors)
            error += float(squared_error(outputs, self.stream.target(batch)))
        return sum(self.layer.ranks.share(error))


def _weights_of(layer: Layer, device: torch.device) -> Iterator[_Weight]:
    """Go through the solved weights of a layer, matrices of Linear modules."""
    for module in layer.modules:
        spec, qparams = module.tensor("weight"), layer.qparams.get((module.name, "weight"))
        if spec is None or qparams is None or module.columns is None:
            continue
        weight = layer.weight(module.name).detach()
        values = fake_quantize(weight, args=spec.args, **qparams)
        target = values.to(device, torch.float32)
        rounding, scales = rounding_by(qparams, spec.args, target, weight.dtype)
        relaxed = RelaxedWeight.of(target, rounding, scales)
        yield _Weight(module.name, spec, values, qparams, relaxed, relaxed.offsets())


def _divided(layer: Layer, stream: LayerStream) -> tuple[list[int], list[int]] | None:
    """Divide the batches of all processes; return those of this one to learn from, and the others.

    None where there are too few.
    """
    counts = layer.ranks.share(len(stream))
    total, before = sum(counts), sum(counts[: layer.ranks.rank])
    if total < 2:
        return None
    # Not the first: batches of like samples are in the order of their lengths.
    first = min(_HELD_OUT // 2, total - 1)
    held_out = [i for i in range(counts[layer.ranks.rank]) if (before + i) % _HELD_OUT == first]
    return [i for i in range(len(stream)) if i not in held_out], held_out
