"""A look at who has seen nothing, before all of the data has run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from calipers.calibration.context import Calibration
from calipers.errors import CalipersWarning, Option, counted, shortened

PART = 0.1
"""How much of the data has run when somebody looks."""


class EarlyLook:
    """Warns, once and after a tenth of the batches, of modules that no token has reached.

    Of fewer than ten batches each is more than a tenth: the end is near enough.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._has_warned = calibration, False

    def after(self, index: int, total: int, names: Iterable[str]) -> None:
        """Look at modules when a batch, one of ``total``, has run."""
        if self._has_warned or PART * total < 1 or index + 1 != math.ceil(PART * total):
            return
        wanted = [name for name in names if self._calibration.is_needed(name)]
        unseen = [name for name in wanted if not self._calibration.tokens(name)]
        if unseen:
            self._has_warned = True
            told = CalipersWarning(
                f"{len(unseen)} of {counted(len(wanted), 'module')} have seen no token in the "
                f"first {index + 1} of {total} batches: {shortened(unseen)}. If that stays so, "
                "the run fails at its end",
                hint=Option("calibrate_all_experts", True)
                + " shows all tokens to all experts; "
                + Option("on_unseen", "weights_only")
                + " or "
                + Option("on_unseen", "peers")
                + " does without.",
            )
            warnings.warn(told, stacklevel=2)
