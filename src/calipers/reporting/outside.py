"""What the page shows from the results of others: predictions, sufficiency, evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calipers.errors import ConfigurationError
from calipers.evaluation import LayerError
from calipers.files.reading import read_json_object


class Sufficiency(NamedTuple):
    """Whether enough data was seen of a tensor, such as ``layers.0.up_proj.input``, and why."""

    tensor: str
    is_enough: bool
    reason: str = ""


class Prediction(NamedTuple):
    """What a module would lose under a scheme: the relative error of its output, ‖Δy‖ / ‖y‖."""

    module: str
    scheme: str
    error: float


def read_advice(file: Path) -> tuple[Prediction, ...]:
    """Read the predictions of a JSON file: ``{"predictions": [{"module": …, "scheme": …, …}]}``."""
    entries = _read(file, "advice").get("predictions")
    if not isinstance(entries, list) or not entries:
        raise _no(file, "advice", "it has no list of 'predictions'")
    predictions = []
    for index, entry in enumerate(entries):
        fields = entry if isinstance(entry, dict) else {}
        module, scheme = fields.get("module"), fields.get("scheme")
        error = number(fields.get("error"))
        is_named = all(isinstance(name, str) and name for name in (module, scheme))
        if not is_named or error is None or error < 0:
            problem = f"prediction {index} lacks a 'module', a 'scheme' or a positive 'error'"
            raise _no(file, "advice", problem)
        predictions.append(Prediction(str(module), str(scheme), error))
    return tuple(predictions)


class Interval(NamedTuple):
    """A figure with the ends of its interval of 95 %, as far as they are known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class EvaluatedModel:
    """The figures of a model; those that compare are None for the float model itself."""

    name: str
    perplexity: Interval
    change: Interval | None = None
    kl: Interval | None = None
    agreement: Interval | None = None
    is_beyond_noise: bool = True
    reliable: bool = True
    layers: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluated:
    """What ``calipers evaluate --json`` found; the float model comes first."""

    samples: int
    tokens: int
    models: tuple[EvaluatedModel, ...]

    @property
    def base(self) -> EvaluatedModel:
        """The float model."""
        return self.models[0]

    def of(self, checkpoint: str) -> EvaluatedModel | None:
        """Return the figures of a checkpoint by its name."""
        return next((each for each in self.models[1:] if each.name == checkpoint), None)


def read_evaluation(file: Path) -> Evaluated:
    """Read what ``calipers evaluate --json`` printed."""
    found = _read(file, "evaluation")
    base, checkpoints = found.get("base"), found.get("checkpoints")
    if not isinstance(base, dict) or not isinstance(checkpoints, dict):
        raise _no(file, "evaluation", "it has no 'base' and 'checkpoints'")
    named = {Path(str(found.get("model") or "float model")).name: base, **checkpoints}
    if len(named) <= len(checkpoints):  # a checkpoint of the same name as the model
        named = {"float model": base, **checkpoints}
    models = tuple(_evaluated(file, name, scores) for name, scores in named.items())
    samples, tokens = (int(number(found.get(key)) or 0) for key in ("samples", "tokens"))
    return Evaluated(samples, tokens, models)


def _evaluated(file: Path, name: str, scores: Any) -> EvaluatedModel:
    fields = scores if isinstance(scores, dict) else {}
    perplexity = _interval(fields.get("perplexity"))
    if perplexity is None:
        raise _no(file, "evaluation", f"'{name}' has no perplexity")
    change, notes, rows = fields.get("change"), fields.get("notes"), fields.get("layers")
    layers = []
    for row in rows if isinstance(rows, list) else ():
        errors = numbers_of(row)
        if "own" in errors and "output" in errors:
            layers.append(LayerError(str(row.get("layer", "")), errors["own"], errors["output"]))
    return EvaluatedModel(
        name,
        perplexity,
        _interval(change),
        _interval(fields.get("kl")),
        _interval(fields.get("agreement")),
        is_beyond_noise=not isinstance(change, dict) or change.get("beyond_noise") is not False,
        reliable=bool(fields.get("reliable", True)),
        layers=tuple(layers),
        notes=tuple(map(str, notes)) if isinstance(notes, list) else (),
    )


def _interval(found: Any) -> Interval | None:
    ends = numbers_of(found)
    return Interval(ends["value"], ends.get("low"), ends.get("high")) if "value" in ends else None


def number(found: Any) -> float | None:
    """Return a finite number, or None for anything else.

    >>> number(2), number(True), number("2"), number(float("nan"))
    (2.0, None, None, None)
    """
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if is_number and math.isfinite(found) else None


def numbers_of(found: Any) -> dict[str, float]:
    """Return the entries of an object that are finite numbers; none if it is no object."""
    items: Iterable[tuple[Any, Any]] = found.items() if isinstance(found, Mapping) else ()
    return {str(name): each for name, value in items if (each := number(value)) is not None}


def _read(file: Path, what: str) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigurationError(
            "is a folder" if file.is_dir() else "does not exist",
            subject=f"The file of the {what} '{file}'",
            hint=f"Give the JSON file that 'calipers {_MADE_BY[what]} --json' printed.",
        )
    return read_json_object(file)


def _no(file: Path, what: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"is no {what}: {problem}",
        subject=f"The file '{file}'",
        hint=f"Give what 'calipers {_MADE_BY[what]} --json' printed.",
    )


_MADE_BY = {"evaluation": "evaluate", "advice": "advise"}
