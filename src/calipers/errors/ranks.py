"""Many processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calipers.errors.base import CalipersError, ConfigurationError
from calipers.errors.text import Words

_MEANINGS = {
    "MASTER_ADDR": "MASTER_ADDR (the machine of rank 0)",
    "MASTER_PORT": "MASTER_PORT (a free port there)",
    "RANK": "RANK (the number of the process, from 0)",
    "WORLD_SIZE": "WORLD_SIZE (how many processes there are)",
}


class LaunchError(ConfigurationError):
    """Processes that were started together and cannot find each other."""

    def __init__(self, problem: str, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        wanted = " and ".join(_MEANINGS.get(name, name) for name in missing)
        super().__init__(
            f"{problem}, so this process cannot find the others of its job, and each would do all "
            "the work",
            hint=f"Start them with torchrun, or set {wanted} for all of them. If every process is "
            "meant to work for itself, set WORLD_SIZE=1",
        )


class RankError(CalipersError, RuntimeError):
    """Processes of a job that cannot go on together."""

    exit_code = 6


class SyncError(RankError):
    """Ranks whose statistics cannot be reduced to one."""


class RankFailedError(RankError):
    """Another process of the job raised an error."""

    def __init__(self, rank: int, step: str, error: Words) -> None:
        super().__init__(
            f"failed while {step}, so this process stops too", subject=f"Rank {rank}", hint=error
        )


class RankLostError(RankError):
    """Another process of the job does not answer any more."""

    def __init__(self, step: str, seconds: float, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        names = ", ".join(f"rank {rank}" for rank in ranks)
        super().__init__(
            f"did not finish {step} and gave no sign of life for {seconds:g} s, so this process "
            "stops too",
            subject=f"{names[0].upper()}{names[1:]}",
            hint="Look at the output of that rank: it died, or its machine cannot be reached",
        )


class TerminatedError(RankError):
    """This process was told to stop, as launchers do with all others when one has died."""

    def __init__(self, rank: int, step: str, gone: Mapping[int, str]) -> None:
        self.ranks = tuple(gone)
        told, hint = f"was told to stop (SIGTERM) while {step}", _CANCELLED
        if gone:
            who = " and ".join(f"rank {other} ({where})" for other, where in gone.items())
            told += (
                f", and {who} {'is' if len(gone) == 1 else 'are'} gone: it crashed or was killed, "
                "perhaps for want of memory"
            )
            hint = "Look at its output"
        super().__init__(told, subject=f"Rank {rank}", hint=f"{hint}. Nothing half-written is left")


_CANCELLED = (
    "Launchers do that when another process of the job has ended, or the job is cancelled. Look "
    "at what the launcher says"
)


class StoreLostError(RankError):
    """What the processes of the job have in common is gone."""

    def __init__(self, step: str, problem: str) -> None:
        super().__init__(
            f"The store of the process group cannot be reached after {step}: "
            f"{problem.strip().splitlines()[0]}",
            hint="It is kept by torchrun or, without it, by rank 0: look at the output of that "
            "process",
        )


class RanksDisagreeError(ConfigurationError):
    """Processes of one job that were not given the same."""

    def __init__(self, what: str, values: Sequence[Any]) -> None:
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        super().__init__(
            f"The ranks do not agree on {what}: rank 0 has {values[0]}, "
            f"rank {other} has {values[other]}",
            hint="Every process must be given the same model, recipe, data and options",
        )
