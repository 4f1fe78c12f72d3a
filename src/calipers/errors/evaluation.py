"""Models that cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence

from calipers.errors.base import CalipersError, ConfigurationError


class DifferentModelError(ConfigurationError):
    """A checkpoint that was not made from the model it is compared with."""

    def __init__(self, name: str, what: str, found: object, expected: object) -> None:
        super().__init__(
            f"'{name}' has {what} {found}, and the float model {expected}. Only checkpoints of the "
            "same model can be compared; give the model that it was made from."
        )


class BrokenLogitsError(CalipersError, ArithmeticError):
    """A model that computes NaN or Inf."""

    exit_code = 3

    def __init__(self, name: str, sample: int) -> None:
        super().__init__(
            f"'{name}' computes logits that are NaN or Inf, first in sample {sample}. It cannot be "
            "judged, and should not be served. Look for a scale that is not finite, or for "
            "activations that leave the range of its dtype."
        )


class NotComputableError(CalipersError, RuntimeError):
    """A checkpoint that is right, and that transformers is known not to load or compute."""

    exit_code = 3

    def __init__(self, name: str, error: Exception, notes: Sequence[str]) -> None:
        what = f"{type(error).__name__}: {error}".rstrip(".")
        super().__init__(
            f"transformers fails on '{name}' ({what}), as was to be expected: {' '.join(notes)} "
            "Judge it with a client that reads it, or quantize the model in another format."
        )


class SameNameError(ConfigurationError):
    """A checkpoint that is given twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The checkpoint '{name}' is given twice. Give each once.")
