"""Many processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calipers.errors.base import CalipersError, ConfigurationError


class RankFailedError(CalipersError, RuntimeError):
    """Another process of the job raised an error."""

    exit_code = 6

    def __init__(self, rank: int, step: str, error: str) -> None:
        super().__init__(f"Rank {rank} failed while {step}, so this process stops too. {error}")


class RankLostError(CalipersError, RuntimeError):
    """Another process of the job does not answer any more."""

    exit_code = 6

    def __init__(self, step: str, seconds: float, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        names = ", ".join(f"rank {rank}" for rank in ranks)
        super().__init__(
            f"{names[0].upper()}{names[1:]} did not finish {step} and gave no sign of life for "
            f"{seconds:g} s, so this process stops too. Look at the output of that rank: it died, "
            "or its machine cannot be reached."
        )


class StoreLostError(CalipersError, RuntimeError):
    """What the processes of the job have in common is gone."""

    exit_code = 6

    def __init__(self, step: str, problem: str) -> None:
        super().__init__(
            f"The store of the process group cannot be reached after {step}: "
            f"{problem.strip().splitlines()[0]} It is kept by torchrun or, without it, by rank 0: "
            "look at the output of that process."
        )


class RanksDisagreeError(ConfigurationError):
    """Processes of one job that were not given the same."""

    def __init__(self, what: str, values: Sequence[Any]) -> None:
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        super().__init__(
            f"The ranks do not agree on {what}: rank 0 has {values[0]}, "
            f"rank {other} has {values[other]}. "
            "Every process must be given the same model, recipe, data and options."
        )
