"""A model under observation, in one process or many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from calipers.errors.base import CalipersError, Fields, ModelRunError
from calipers.errors.text import Words

if TYPE_CHECKING:
    from typing_extensions import Unpack


class UnseenModulesError(CalipersError, ValueError):
    """Modules whose parameters need data that never reached them.

    :param names: the modules
    """

    exit_code = 4

    def __init__(self, what: Words, *, names: Iterable[str] = (), **fields: Unpack[Fields]) -> None:
        self.names = tuple(names)
        super().__init__(what, **fields)


class FusedExpertsError(ModelRunError, NotImplementedError):
    """Experts in stacked parameters that cannot be told apart faithfully."""


class RankError(CalipersError, RuntimeError):
    """Processes of a job that cannot go on together."""

    exit_code = 6


def cannot_unfuse(where: str, module: object, problem: str) -> FusedExpertsError:
    """Say why experts in stacked parameters cannot be told apart."""
    return FusedExpertsError(
        f"are stacked in one parameter and cannot be turned into Linear layers: {problem}",
        subject=f"The experts of '{where}' ({type(module).__name__})",
        hint='To quantize the rest of the model, leave them out: ignore: ["re:.*experts.*"]',
    )
