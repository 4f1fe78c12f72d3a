"""Options of observers: typed, frozen, with unknown ones refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from calipers.errors import ConfigurationError, nearest

Options = TypeVar("Options", bound="ObserverOptions")


def _demand(holds: Callable[[float], bool], text: str) -> AfterValidator:
    """Return a validator that has the demand in words as its docstring."""

    def check(value: float) -> float:
        if not (math.isfinite(value) and holds(value)):
            raise ValueError(f"must be {text}, got {value}")
        return value

    check.__doc__ = text
    return AfterValidator(check)


AveragingConstant = Annotated[float, _demand(lambda v: 0 < v <= 1, "in (0, 1]")]
Shrink = Annotated[float, _demand(lambda v: 0 <= v <= 1, "in [0, 1]")]
Patience = Annotated[int, _demand(lambda v: v >= 0, ">= 0")]
Grid = Annotated[float, _demand(lambda v: v > 0, "> 0")]
Norm = Annotated[float, _demand(lambda v: v > 0, "a finite positive number")]
Percentile = Annotated[float, _demand(lambda v: 0 < v <= 100, "in (0, 100]")]
Bins = Annotated[int, _demand(lambda v: 256 <= v <= 65536, "from 256 to 65536")]
Expand = Annotated[float, _demand(lambda v: v >= 1, "at least 1")]


class ObserverOptions(BaseModel):
    """What every observer can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonfinite: Literal["raise", "ignore"] = Field(
        default="raise", description="NaN and Inf are an error, or left out and counted"
    )


class ImportanceOptions(ObserverOptions):
    """Options of an observer that needs to know the inputs."""

    strict: bool = Field(default=False, description="unusable importance is an error")


class MovingAverageOptions(ObserverOptions):
    """Options of an observer that follows a stream."""

    averaging_constant: AveragingConstant = Field(
        default=0.01, description="weight of the newest batch; 1 means no memory"
    )


class SearchOptions(ObserverOptions):
    """Options of an observer that tries out shrunk ranges."""

    maxshrink: Shrink = Field(default=0.20, description="how far the range is shrunk at most")
    patience: Patience = Field(default=5, description="candidates in vain that end the search")
    grid: Grid = Field(default=100.0, description="candidates per whole range")
    norm: Norm = Field(default=2.4, description="exponent of the error")
    expand: Expand = Field(default=1.0, description="factor on the range before shrinking")

    @property
    def steps(self) -> int:
        """How many candidates the search tries."""
        return int(self.maxshrink * self.grid)

    @property
    def factors(self) -> list[float]:
        """What the range is multiplied by, from the whole range downwards."""
        return [1 - i / self.grid for i in range(self.steps)]

    @property
    def stop_after(self) -> int | None:
        """How many candidates in a row in vain end the search; None for never."""
        return self.patience


class MovingAverageSearchOptions(SearchOptions, MovingAverageOptions):
    """Options of an observer that follows a stream of searched ranges."""


def parse_options(kind: type[Options], given: Mapping[str, Any], owner: str) -> Options:
    """Build options from keywords; each problem is told in the words of the user.

    >>> parse_options(SearchOptions, {"patience": -1}, "mse")
    Traceback (most recent call last):
    calipers.errors.base.ConfigurationError: Observer 'mse': patience must be >= 0, got -1.
    """
    known = sorted(kind.model_fields)
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"Unknown option '{key}' for observer '{owner}'",
                meant=nearest(key, known),
                allowed=known,
            )
    try:
        return kind(**given)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            if problem["type"] == "value_error":
                demand = str(problem["ctx"]["error"])
            else:
                got = f"got {problem['input']!r}"
                demand = f"{problem['msg'].replace('Input should', 'must')}, {got}"
            problems.append(f"{problem['loc'][0]} {demand}")
        raise ConfigurationError("; ".join(problems), where=f"Observer '{owner}'") from None
