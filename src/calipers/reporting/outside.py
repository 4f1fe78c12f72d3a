"""What the page shows from the results of others: predictions, sufficiency, evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from calipers.errors import ConfigurationError
from calipers.evaluation import LayerError
from calipers.files.reading import read_json_object


class Sufficiency(NamedTuple):
    """Whether enough data was seen of a tensor, such as ``layers.0.up_proj.input``, and why."""

    tensor: str
    is_enough: bool
    reason: str = ""


_Name = Annotated[str, Field(min_length=1, strict=True)]


@dataclass(frozen=True)
class Prediction:
    """What a module would lose under a scheme: the relative error of its output, ‖Δy‖ / ‖y‖."""

    module: _Name
    scheme: _Name
    error: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


def read_advice(file: Path) -> tuple[Prediction, ...]:
    """Read the predictions of a JSON file: ``{"predictions": [{"module": …, "scheme": …, …}]}``."""
    entries = _read(file, "advice").get("predictions")
    if not isinstance(entries, list) or not entries:
        raise _no(file, "advice", "it has no list of 'predictions'")
    try:
        return TypeAdapter(tuple[Prediction, ...]).validate_python(entries)
    except ValidationError as error:
        index = error.errors()[0]["loc"][0]
        problem = f"prediction {index} lacks a 'module', a 'scheme' or a positive 'error'"
        raise _no(file, "advice", problem) from error


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


_Bound = Annotated[float | None, BeforeValidator(number)]


@dataclass(frozen=True)
class Interval:
    """A figure with the ends of its interval of 95 %, as far as they are known.

    :param beyond_noise: of a difference: whether it would be there with other roundings, too
    """

    value: float
    low: _Bound = None
    high: _Bound = None
    beyond_noise: bool = True


# What has no finite value, as the perplexity of a model that is ruined, counts as not known.
_Figure = Annotated[
    Interval | None, BeforeValidator(lambda found: found if "value" in numbers_of(found) else None)
]


@dataclass(frozen=True)
class EvaluatedModel:
    """The figures of a model; those that compare are None for the float model itself."""

    name: str
    perplexity: _Figure
    change: _Figure = None
    kl: _Figure = None
    agreement: _Figure = None
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
    models = []
    for name, scores in named.items():
        fields = scores if isinstance(scores, dict) else {}
        if "value" not in numbers_of(fields.get("perplexity")):
            raise _no(file, "evaluation", f"'{name}' has no perplexity")
        try:
            model = TypeAdapter(EvaluatedModel).validate_python({**fields, "name": name})
        except ValidationError as error:
            first = error.errors()[0]
            place = " → ".join(map(str, first["loc"]))
            raise _no(file, "evaluation", f"'{name}', {place}: {first['msg']}") from error
        models.append(model)
    samples, tokens = (int(number(found.get(key)) or 0) for key in ("samples", "tokens"))
    return Evaluated(samples, tokens, tuple(models))


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
