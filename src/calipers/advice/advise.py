"""Advice: what each module loses in each scheme, and the recipe that loses least in a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from calipers.advice.budget import Budget
from calipers.advice.candidates import (
    SCHEMES,
    SOLVER,
    UNQUANTIZED,
    Candidate,
    read_candidates,
)
from calipers.advice.choosing import Chosen, Options, UnreachableError, choose, front
from calipers.advice.groups import alike_groups, patterns_for
from calipers.advice.predicting import Prediction, predict
from calipers.calibration.progress import Progress
from calipers.errors import ConfigurationError, Option
from calipers.html import facts_table, html_table
from calipers.measurements import Measurements
from calipers.modifiers import QuantizationModifier
from calipers.modifiers.choices import scheme_to_data
from calipers.quantizing import check_complete
from calipers.recipes import Recipe, load_recipe

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
class Advice:
    """What to choose.

    :param predictions: every module in every scheme
    :param harm: what was minimized: ``loss`` (nats per token, where sensitivity was measured) or
        ``error`` (the mean of squared relative errors of outputs)
    :param front: the choices that no other beats in both size and harm, from the smallest on
    :param chosen: module → its prediction in the scheme that it should have; empty without a budget
    :param gap: how much less, relatively, a choice could lose that was not ruled out; 0: none
    :param recipe: quantizes as chosen; None without a budget
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

    def counts(self) -> dict[str, int]:
        """Return how many modules should have each scheme."""
        found: dict[str, int] = {}
        for each in (self.chosen or {}).values():
            found[each.scheme] = found.get(each.scheme, 0) + 1
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; errors in dB, too."""
        return {
            "harm": self.harm,
            "budget": None if self.budget is None else str(self.budget),
            "total": None if self.total is None else asdict(self.total),
            "gap": self.gap,
            "chosen": {name: each.scheme for name, each in (self.chosen or {}).items()},
            "uniform": {name: asdict(each) for name, each in self.uniform.items()},
            "front": [asdict(each) for each in self.front],
            "predictions": [_plain(each) for each in self.predictions],
            "recipe": None if self.recipe is None else self.recipe.to_yaml(),
        }

    def __repr__(self) -> str:
        facts = (f"{key}: {fact}" for key, fact in self._facts().items())
        return f"Advice({', '.join(facts)})"

    def _repr_html_(self) -> str:
        worst = sorted((self.chosen or {}).values(), key=lambda each: -_harm_of(each, self.harm))
        rows = [_row(each) for each in worst]
        return facts_table(self._facts()) + html_table(rows, "Modules that lose most", most=10)

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"schemes": ", ".join(self.uniform)}
        if self.total is not None:
            facts["chosen"] = ", ".join(f"{name} × {n}" for name, n in self.counts().items())
            facts["bits per weight"] = f"{self.total.bits:.3f}"
            facts[f"predicted {self.harm}"] = f"{self.total.harm:.4g}"
        return facts


def advise(
    model: str | Path,
    measurements: Measurements | str | Path,
    schemes: str | Iterable[str] = SCHEMES,
    budget: str | float | Budget | None = None,
    *,
    solvers: Iterable[Any] = (SOLVER,),
    ignore: Sequence[str] = ("lm_head",),
    trust_remote_code: bool = False,
    progress: bool | Progress | None = None,
) -> Advice:
    """Predict what each module loses in each scheme, and choose what loses least in a budget.

    Modules that engines run as one (q, k and v; gate and up; the experts of a layer) get the same
    scheme. The model does not run: weights are read from disk, one after the other.

    :param model: the folder of the model, or its name on the hub
    :param measurements: what :func:`calipers.measure` has found of it, or the file of that. With
        ``collect="sensitivity"`` predictions are of the loss of the model, and much better
    :param schemes: presets; ``W4A16-g32`` has groups of 32, ``UNQUANTIZED`` leaves a module alone
    :param budget: ``"4.5bpw"`` (bits per weight, scales included, of the modules that are advised
        on), ``"900MB"``, ``"0.02nats"`` or ``"-25dB"``; None only predicts
    :param solvers: the observers of weights that are tried: names, or mappings with options
    :param ignore: modules that are not quantized, and do not count
    """
    limit = None if budget is None else Budget.parse(budget)
    candidates = read_candidates(schemes, solvers, ignore)
    seen = (
        measurements if isinstance(measurements, Measurements) else Measurements.load(measurements)
    )
    check_complete(seen)
    rows = predict(
        model,
        candidates,
        seen,
        trust_remote_code=trust_remote_code,
        progress=Progress.of(progress),
    )
    return _advice(candidates, rows, limit)


def _advice(
    candidates: Sequence[Candidate], rows: Sequence[Sequence[Prediction]], budget: Budget | None
) -> Advice:
    names = [each.module for each in rows[0]]
    groups = alike_groups(names)
    harm = _kind_of_harm(rows, budget)
    options = _options(rows, groups, harm)
    weights = sum(each.weights for each in rows[0])
    known = Advice(
        tuple(each for row in rows for each in row),
        harm,
        tuple(_point(each, weights) for each in front(options)),
        {
            candidate.name: _point(_uniform(options, column), weights)
            for column, candidate in enumerate(candidates)
        },
    )
    if budget is None:
        return known
    found = _choice(options, budget, weights)
    by_module = {
        name: column for group, column in zip(groups, found.columns, strict=True) for name in group
    }
    index = {name: number for number, name in enumerate(names)}
    chosen = {name: rows[column][index[name]] for name, column in by_module.items()}
    return Advice(
        known.predictions,
        harm,
        known.front,
        known.uniform,
        budget,
        {name: chosen[name] for name in names},
        _point(found, weights),
        found.gap,
        _recipe_of(candidates, by_module),
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


def _options(
    rows: Sequence[Sequence[Prediction]], groups: Sequence[Sequence[str]], harm: Harm
) -> Options:
    """Add up what candidates cost each group."""
    by_name = [{each.module: each for each in row} for row in rows]
    share = 1.0 if harm == "loss" else 1 / len(rows[0])  # errors are averaged over modules
    sizes = [[sum(row[n].size for n in group) for row in by_name] for group in groups]
    harms = [
        [share * sum(_harm_of(row[n], harm) for n in group) for row in by_name] for group in groups
    ]
    return Options(sizes, harms)


def _choice(options: Options, budget: Budget, weights: int) -> Chosen:
    try:
        if budget.limits_size:
            return choose(options, size=budget.as_bytes(weights))
        return choose(options, harm=budget.as_harm())
    except UnreachableError as error:
        raise ConfigurationError(
            "cannot be met: the nearest that can is " + _nearest(error.least, budget, weights),
            subject=Option("budget", str(budget)),
            hint="Give that, or offer smaller (or better) schemes.",
        ) from error


def _nearest(least: float, budget: Budget, weights: int) -> str:
    if budget.unit == "bpw":
        return f"{math.ceil(8e4 * least / weights) / 1e4:g}bpw"
    if budget.unit == "bytes":
        return f"{math.ceil(least)} bytes"
    return f"{least:.4g}nats" if budget.unit == "nats" else f"{10 * math.log10(least):.2f}dB"


def _uniform(options: Options, column: int) -> Chosen:
    return Chosen(
        (column,) * len(options.sizes),
        sum(row[column] for row in options.sizes),
        sum(row[column] for row in options.harms),
    )


def _point(chosen: Chosen, weights: int) -> Point:
    return Point(int(chosen.size), 8 * chosen.size / weights, chosen.harm)


def _recipe_of(candidates: Sequence[Candidate], chosen: Mapping[str, int]) -> Recipe | None:
    """Return a recipe that quantizes as chosen; None where everything stays as it is."""
    groups = {}
    for column, candidate in enumerate(candidates):
        names = [name for name, each in chosen.items() if each == column]
        if names and candidate.recipe is not None:
            data = scheme_to_data(candidate.quantization)
            groups[candidate.name] = {**data, "targets": patterns_for(names)}
    return load_recipe(QuantizationModifier(config_groups=groups)) if groups else None


def _plain(each: Prediction) -> dict[str, Any]:
    decibels = each.decibels if math.isfinite(each.decibels) else None
    return {**asdict(each), "decibels": decibels, "bits": each.bits}


def _row(each: Prediction) -> dict[str, object]:
    return {
        "module": each.module,
        "scheme": each.scheme,
        "error": f"{each.error:.2%}",
        "dB": f"{each.decibels:.1f}",
        "loss": "–" if each.loss is None else f"{each.loss:.2g}",
    }


__all__ = ["UNQUANTIZED", "Advice", "Point", "advise"]
