"""Advice: what each module loses in each scheme, and the recipe that loses least in a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from compressed_tensors.utils.match import match_named_modules

from calipers.advice.candidates import (
    UNQUANTIZED,
    Candidate,
    read_candidates,
    read_methods,
    read_schemes,
)
from calipers.advice.choosing import (
    Budget,
    Chosen,
    Options,
    UnreachableError,
    choose,
    chosen,
    front,
)
from calipers.advice.predicting import Prediction, predict, prepare_trials
from calipers.engine.job import read_measurements
from calipers.engine.quantize import skeleton_for
from calipers.errors import ConfigurationError, Option
from calipers.judging.losses import decibels, format_decibels
from calipers.measurements import Measurements
from calipers.notebook import NotebookView
from calipers.options import IGNORED_BY_DEFAULT
from calipers.planning.measuring import HESSIAN
from calipers.recipes import Recipe, load_recipe
from calipers.runtime.progress import Progress
from calipers.steps.base import steps_by_method
from calipers.topology.names import groups_of_one_scheme

Harm = Literal["loss", "error"]


@dataclass(frozen=True)
class Point:
    """A choice of schemes for all modules.

    :param bits: per weight
    :param harm: what the loss gains, or the mean of squared relative errors of outputs
    """

    size: int
    bits: float
    harm: float


@dataclass(frozen=True)
class Advice(NotebookView):
    """What to choose.

    :param predictions: every module in every scheme
    :param harm: what was minimized: ``loss`` (nats per token, where sensitivity was measured) or
        ``error`` (the mean of squared relative errors of outputs)
    :param front: the choices that no other beats in both size and harm, from the smallest on
    :param chosen: module → its prediction in the scheme that it should have; empty without a budget
    :param gap: how much less, relatively, a choice could lose that was not ruled out; 0: none
    :param recipe: quantizes as chosen, by the methods that were chosen; None without a budget
    :param methods: how weights were rounded in the predictions
    :param left_out: schemes that were asked for, and do not run on the target
    """

    predictions: tuple[Prediction, ...]
    harm: Harm
    front: tuple[Point, ...]
    uniform: Mapping[str, Point]
    budget: Budget | None = None
    chosen: Mapping[str, Prediction] | None = None
    total: Point | None = None
    gap: float = 0.0
    recipe: Recipe | None = None
    methods: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """Return how many modules should have each scheme, and be rounded by each method."""
        return dict(Counter(each.choice for each in (self.chosen or {}).values()))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; errors in dB, too."""
        return {
            "harm": self.harm,
            "budget": None if self.budget is None else str(self.budget),
            "total": None if self.total is None else asdict(self.total),
            "gap": self.gap,
            "chosen": {name: each.scheme for name, each in (self.chosen or {}).items()},
            "methods": {name: each.method for name, each in (self.chosen or {}).items()},
            "compared": {"methods": list(self.methods), "left_out": list(self.left_out)},
            "uniform": {name: asdict(each) for name, each in self.uniform.items()},
            "front": [asdict(each) for each in self.front],
            "predictions": [
                {**asdict(each), "decibels": each.decibels, "bits": each.bits}
                for each in self.predictions
            ],
            "recipe": None if self.recipe is None else self.recipe.to_yaml(),
        }

    def __repr__(self) -> str:
        facts = (f"{key}: {fact}" for key, fact in self.facts().items())
        return f"Advice({', '.join(facts)})"

    def worst(self) -> list[Prediction]:
        """Return what was chosen for each module, what loses most first."""
        return sorted((self.chosen or {}).values(), key=lambda each: -_harm_of(each, self.harm))

    def format_harm(self, harm: float) -> str:
        """Return what a choice loses, with its unit.

        The mean of squared errors is told as the error that all modules would have alike.
        """
        return f"{harm:+.4f} nats" if self.harm == "loss" else format_decibels(math.sqrt(harm))

    def facts(self) -> dict[str, object]:
        """Return what matters most, by its name."""
        facts: dict[str, object] = {"compared": ", ".join(self.uniform)}
        if self.total is not None:
            facts["chosen"] = ", ".join(f"{name} × {n}" for name, n in self.counts().items())
            facts["bits per weight"] = f"{self.total.bits:.3f}"
            facts[f"predicted {self.harm}"] = f"{self.total.harm:.4g}"
        return facts


def advise(
    model: str | Path,
    measurements: Measurements | str | Path,
    schemes: str | Iterable[str] | None = None,
    budget: str | float | Budget | None = None,
    *,
    methods: str | Iterable[str] | None = None,
    solvers: Iterable[Any] | None = None,
    group_size: int | None = None,
    target: str | None = None,
    ignore: Sequence[str] = IGNORED_BY_DEFAULT,
    trust_remote_code: bool = False,
    progress: bool | Progress | None = None,
) -> Advice:
    """Predict what each module loses in each scheme, and choose what loses least in a budget.

    Predictions are of every method that the measurements allow: where they have Hessians, weights
    are also solved with error feedback (GPTQ), and the recipe names the method that loses less.
    Modules that engines run as one (q, k and v; gate and up; the experts of a layer) get the same
    scheme. The model does not run: weights are read from disk, one after the other.

    :param model: the folder of the model, or its name on the hub
    :param measurements: what :func:`calipers.measure` has found of it, or the file of that. With
        ``collect="sensitivity"`` predictions are of the loss of the model, and much better; with
        ``collect="hessian"`` GPTQ is compared, too
    :param schemes: presets; ``W4A16-g32`` has groups of 32, ``UNQUANTIZED`` leaves a module alone.
        Groups of a preset that do not divide a weight are made smaller. None: W4A16, W8A16 (or W8A8
        where the target does not run it) and UNQUANTIZED
    :param budget: ``"4.5bpw"`` (bits per weight, scales included, of the modules that are advised
        on), ``"900MB"``, ``"0.02nats"`` or ``"-25dB"``; None only predicts
    :param methods: how weights may be rounded, ``rtn`` or ``gptq``; None: as the measurements allow
    :param solvers: the observers of weights that are tried: names, or mappings with options; None:
        ``optimal``, by E[x²] or, with GPTQ, by the Hessian
    :param group_size: of schemes that leave it open; None: 128, or what divides each weight
    :param target: compare only schemes that run there: ``transformers``, ``vllm-cpu`` or
        ``vllm-cuda``
    :param ignore: modules that are not quantized, and do not count
    """
    limit = None if budget is None else Budget.parse(budget)
    names, left_out = read_schemes(schemes, target, group_size)
    asked = None if methods is None else read_methods(methods)
    seen = read_measurements(measurements)
    has_hessians = any(
        base_name == "input" and HESSIAN in statistics
        for (_, base_name), statistics in seen.tensors().items()
    )
    compared = asked or (("rtn", "gptq") if has_hessians else ("rtn",))
    candidates = read_candidates(names, compared, solvers, ignore)
    recipe = next(each.recipe for each in candidates if each.recipe is not None)
    skeleton = skeleton_for(model, recipe, trust_remote_code)
    matched = match_named_modules(skeleton, ["Linear"], list(ignore))
    columns = {name: module.in_features for name, module in matched}
    candidates = tuple(each.fitted(columns) for each in candidates)
    trials = prepare_trials(model, candidates, seen, trust_remote_code=trust_remote_code)
    if limit is not None and limit.limits_size:  # refused before anything is solved
        shapes, as_is = [each.shapes for each in trials], math.inf
        least = 0.0
        for group in groups_of_one_scheme(shapes[0]):
            if any(each.recipe is None for each in candidates):
                as_is = sum(shapes[0][name].as_is for name in group)
            least += min(as_is, *(sum(each[name].size for name in group) for each in shapes))
        weights = sum(each.weights for each in shapes[0].values())
        if least > limit.as_bytes(weights):
            raise _unreachable(limit, least, weights)
    rows = predict(trials, candidates, seen, Progress.of(progress))
    advice = _advice(candidates, rows, limit)
    return replace(advice, methods=compared, left_out=tuple(left_out))


def _advice(
    candidates: Sequence[Candidate], rows: Sequence[Sequence[Prediction]], budget: Budget | None
) -> Advice:
    names = [each.module for each in rows[0]]
    groups = groups_of_one_scheme(names)
    harm = _kind_of_harm(rows, budget)
    by_name = [{each.module: each for each in row} for row in rows]
    share = 1.0 if harm == "loss" else 1 / len(names)  # errors are averaged over modules
    options = Options(
        [[sum(row[name].size for name in group) for row in by_name] for group in groups],
        [
            [share * sum(_harm_of(row[name], harm) for name in group) for row in by_name]
            for group in groups
        ],
    )
    weights = sum(each.weights for each in rows[0])

    def point(choice: Chosen) -> Point:
        return Point(int(choice.size), 8 * choice.size / weights, choice.harm)

    advice = Advice(
        tuple(each for row in rows for each in row),
        harm,
        tuple(map(point, front(options))),
        {
            candidate.name: point(chosen(options, (column,) * len(groups)))
            for column, candidate in enumerate(candidates)
        },
    )
    if budget is None:
        return advice
    try:
        if budget.limits_size:
            choice = choose(options, size=budget.as_bytes(weights))
        else:
            choice = choose(options, harm=budget.as_harm())
    except UnreachableError as error:
        raise _unreachable(budget, error.least, weights) from error
    by_module = {
        name: column for group, column in zip(groups, choice.columns, strict=True) for name in group
    }
    return replace(
        advice,
        budget=budget,
        chosen={name: rows[by_module[name]][number] for number, name in enumerate(names)},
        total=point(choice),
        gap=choice.gap,
        recipe=_recipe_of(candidates, by_module),
    )


def _kind_of_harm(rows: Sequence[Sequence[Prediction]], budget: Budget | None) -> Harm:
    is_known = all(each.loss is not None for row in rows for each in row)
    if budget is not None and budget.unit == "nats" and not is_known:
        raise ConfigurationError(
            "speaks of the loss of the model, and how sensitive that is was not measured",
            subject=Option("budget", str(budget)),
            hint="Measure again, with 'calipers measure … --collect sensitivity', or give a budget "
            "in bits per weight, bytes or dB.",
        )
    if budget is not None and budget.unit == "dB":
        return "error"
    return "loss" if is_known else "error"


def _harm_of(each: Prediction, harm: Harm) -> float:
    return each.error**2 if harm == "error" else each.loss or 0.0


def _unreachable(budget: Budget, least: float, weights: int) -> ConfigurationError:
    if budget.unit == "bpw":
        nearest = f"{math.ceil(8e4 * least / weights) / 1e4:g}bpw"
    elif budget.unit == "bytes":
        nearest = f"{math.ceil(least)} bytes"
    elif budget.unit == "nats":
        nearest = f"{least:.4g}nats"
    else:
        nearest = f"{decibels(math.sqrt(least)):.2f}dB"
    return ConfigurationError(
        "cannot be met: the nearest that can is " + nearest,
        subject=Option("budget", str(budget)),
        hint="Give that, or offer smaller (or better) schemes.",
    )


def _recipe_of(candidates: Sequence[Candidate], chosen: Mapping[str, int]) -> Recipe | None:
    """Return a recipe that quantizes as chosen; None where everything stays as it is."""
    groups: dict[str, dict[str, Any]] = {}
    for column, candidate in enumerate(candidates):
        names = [name for name, each in chosen.items() if each == column]
        if names and candidate.recipe is not None:
            groups.setdefault(candidate.method, {}).update(candidate.config_groups(names))
    steps = steps_by_method()
    made = [steps[method](config_groups=each) for method, each in groups.items()]
    # What was predicted, and what quantize can do with the same measurements.
    return load_recipe(made).on_float_inputs() if made else None


__all__ = ["UNQUANTIZED", "Advice", "Point", "advise"]
