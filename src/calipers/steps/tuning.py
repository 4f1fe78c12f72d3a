"""The modifier that tunes what is not quantized on the outputs of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from calipers.calibration.data import Batch
from calipers.calibration.whole_model import Samples, Values, WholeModel
from calipers.observers import QParamsDict
from calipers.planning.plan import Changes, StepPlan
from calipers.solvers.tuning import FixedCodes, Vector, divergence, tunes_scales
from calipers.steps.base import Layer, Modifier
from calipers.topology.model import norm_vectors

_JUDGEMENTS = 2  # in an epoch
_PATIENCE = 3  # judgements in a row without a better one
_BETAS = (0.9, 0.95)  # of Adam: there are some hundred steps, not some thousand
NOT_FINITE = "ended early: a step had values that are not finite"


class TuningModifier(Modifier):
    """Tunes the scales of quantized weights and the norms, so that logits come close again.

    When all else is solved, the divergence of the quantized model from the model as it was,
    KL in nats a token, is brought down on the calibration samples. Codes stay as they are, and so
    do MX scales. Some of the samples are held out: the result is taken only if the divergence on
    these, of the model as it is stored, is lower than before.

    :param epochs: how often each sample is used
    :param iters: how many steps are taken, instead of a number of epochs
    :param lr: the rate of Adam at the first step; it falls to 0 in a straight line
    :param batch_size: samples of a step, in all processes together
    :param held_out: the part of the samples that is held out; at least two are
    :param seed: of the choice and the order of samples

    >>> TuningModifier(lr=5e-4).epochs
    2
    """

    epochs: Annotated[int, Field(ge=1)] = 2
    iters: Annotated[int, Field(ge=1)] | None = None
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    batch_size: Annotated[int, Field(ge=1)] = 4
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: int = 0

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return no patterns: it quantizes nothing."""
        return (), ()

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        """Ask for the whole model in the end."""
        return StepPlan(finishes=True)

    def solve(self, layer: Layer) -> Changes:  # noqa: ARG002
        """Leave the parts of the model to other steps."""
        return Changes()

    def finish(self, whole: WholeModel) -> Changes:
        """Tune, and return what is better on the samples held out; nothing where it is not."""
        samples = whole.samples(self.held_out, self.batch_size, self.seed)
        tuned = _Tuned.of(whole)
        with whole.ready():
            solved = _Result(_judge(whole, tuned.solved, samples))
            best, note = self._train(whole, tuned, samples, solved)
        label, found = self.label(), Changes()
        if best.changes is not None:
            found = tuned.stored(best.changes)
        elif not note:
            note = (
                "left as it was: tuning does not bring the divergence on samples held out below "
                f"{solved.nats:.4g} nats a token"
            )
        figures = {"before": solved.nats, "after": best.nats, "steps": best.steps}
        notes = {label: note} if note else {}
        return replace(found, notes=notes, figures={label: figures})

    def _train(
        self, whole: WholeModel, tuned: _Tuned, samples: Samples, solved: _Result
    ) -> tuple[_Result, str]:
        """Return the best that there was by the samples held out, and what went wrong."""
        best, since = solved, 0
        changes = tuned.start(self.seed)
        if not changes:
            return best, "left as it was: it has no norms, and no scales that can be tuned"
        if not math.isfinite(solved.nats):
            return best, NOT_FINITE
        optimizer = torch.optim.Adam(changes.values(), lr=self.lr, betas=_BETAS)
        total = self.iters or self.epochs * samples.steps_per_epoch
        pause = -(-samples.steps_per_epoch // _JUDGEMENTS)
        with whole.progress.counting("tuning", total, "steps") as add:
            for step, batches in zip(range(1, total + 1), samples.steps(), strict=False):
                if not _set_gradients(whole, tuned, changes, batches):
                    return best, NOT_FINITE
                for group in optimizer.param_groups:
                    group["lr"] = self.lr * (1 - (step - 1) / total)
                optimizer.step()
                add(1)
                if step % pause and step < total:
                    continue
                nats = _judge(whole, tuned.frozen(changes), samples)
                since += 1
                if nats < best.nats:
                    kept = {place: change.detach().clone() for place, change in changes.items()}
                    best, since = _Result(nats, kept, step), 0
                if not math.isfinite(nats):
                    return best, NOT_FINITE
                if since == _PATIENCE:
                    break
        return best, ""


def _set_gradients(
    whole: WholeModel, tuned: _Tuned, changes: _Vectors, batches: Iterable[Batch]
) -> bool:
    """Set the gradients of the mean over the tokens of all processes; return whether all is finite.

    The gradient of each batch is found by itself: they need not fit into memory together.
    """
    for change in changes.values():
        change.grad = None
    total, tokens = 0.0, 0
    for batch in batches:
        whole.ranks.check()
        with torch.no_grad():
            teacher, rows = whole.predictions(batch)
        with torch.enable_grad(), whole.quantized(tuned.changed(changes)):
            loss = divergence(teacher, whole.predictions(batch)[0])
            loss.backward()  # type: ignore[no-untyped-call]
        total, tokens = total + float(loss.detach()), tokens + rows
    # What a batch does not reach, such as an expert, has no gradient.
    mine = [torch.zeros_like(c) if c.grad is None else c.grad for c in changes.values()]
    everywhere = whole.ranks.share((total, tokens, mine))
    tokens = max(sum(theirs[1] for theirs in everywhere), 1)
    is_finite = math.isfinite(sum(theirs[0] for theirs in everywhere))
    for index, change in enumerate(changes.values()):
        # In the order of processes: all of them get the same, to the bit.
        parts = [theirs[2][index] for theirs in everywhere]
        change.grad = torch.stack(parts).sum(0).div_(tokens).to(change)
        is_finite &= bool(torch.isfinite(change.grad).all())
    return is_finite


def _judge(whole: WholeModel, values: Values, samples: Samples) -> float:
    """Return the divergence on the samples held out of all processes, in nats a token."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in samples.held_out:
            whole.ranks.check()
            teacher, rows = whole.predictions(batch)
            with whole.quantized(values):
                total += float(divergence(teacher, whole.predictions(batch)[0]))
            tokens += rows
    everywhere = whole.ranks.share((total, tokens))
    return sum(theirs[0] for theirs in everywhere) / max(sum(theirs[1] for theirs in everywhere), 1)


_Vectors = Mapping[tuple[str, str], Tensor]
"""(module, tensor) → what is changed of it."""


@dataclass(frozen=True)
class _Result:
    """The divergence after some steps, and the changes by then; None: those of other steps."""

    nats: float
    changes: _Vectors | None = None
    steps: int = 0


@dataclass(frozen=True)
class _Tuned:
    """What is tuned of a model.

    :param solved: the values that the solved model computes with
    :param weights: module → its weight, by its scales
    :param vectors: (module, tensor) → a vector of a norm
    """

    solved: Values
    weights: Mapping[str, FixedCodes]
    vectors: Mapping[tuple[str, str], Vector]

    @classmethod
    def of(cls, whole: WholeModel) -> _Tuned:
        weights = {}
        for name, args, qparams in whole.quantized_weights():
            weight = whole.stored(name, "weight").to(whole.device)
            if tunes_scales(args) and weight.ndim == 2:
                weights[name] = FixedCodes.of(weight, args, **qparams)
        places = norm_vectors(whole.model)
        vectors = {place: Vector(whole.stored(*place).to(whole.device)) for place in places}
        return cls(whole.solved(), weights, vectors)

    def start(self, seed: int) -> _Vectors:
        """Return no changes, which take gradients."""
        draw = torch.Generator().manual_seed(seed)
        starts = {(name, "weight"): weight.start(draw) for name, weight in self.weights.items()}
        starts |= {place: vector.start(draw) for place, vector in self.vectors.items()}
        return {place: start.requires_grad_() for place, start in starts.items()}

    def changed(self, changes: _Vectors) -> Values:
        """Return the values of the model as functions of changes."""
        weights = {
            (n, "weight"): partial(w.weight, changes[n, "weight"]) for n, w in self.weights.items()
        }
        vectors = {place: partial(v.value, changes[place]) for place, v in self.vectors.items()}
        return {**self.solved, **weights, **vectors}

    def frozen(self, changes: _Vectors) -> Values:
        """Return the values of the model as it is stored and loaded again."""
        weights = {
            (n, "weight"): partial(w.frozen, changes[n, "weight"]) for n, w in self.weights.items()
        }
        vectors = {place: partial(v.stored, changes[place]) for place, v in self.vectors.items()}
        return {**self.solved, **weights, **vectors}

    def stored(self, changes: _Vectors) -> Changes:
        """Return what changes make of the model, in the dtypes in which it is stored."""
        tensors = {place: vector.stored(changes[place]) for place, vector in self.vectors.items()}
        qparams: dict[tuple[str, str], QParamsDict] = {}
        for name, weight in self.weights.items():
            place = name, "weight"
            tensors[place], scale = weight.stored(changes[place])
            qparams[place] = {
                "scale": scale,
                "zero_point": weight.zero_point,
                "global_scale": weight.global_scale,
            }
        return Changes(qparams, tensors)
