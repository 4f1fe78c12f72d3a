"""How much a quantized model may take, or lose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from calipers.checkpoint.writer import parse_size
from calipers.errors import ConfigurationError, Option
from calipers.judging.errors import error_of_decibels

Unit = Literal["bpw", "bytes", "nats", "dB"]

_EXAMPLES = (
    "Give bits per weight ('4.5bpw'), a size ('900MB'), what the loss may gain ('0.02nats'), or "
    "the error of outputs ('-25dB')."
)


@dataclass(frozen=True)
class Budget:
    """A limit: of the size of the modules that are advised on, or of what they lose.

    :param unit: bits per weight, bytes, nats per token that are added to the loss, or the mean
        relative error of outputs in dB

    >>> Budget.parse("4.5bpw"), Budget.parse("900 MB")
    (Budget(amount=4.5, unit='bpw'), Budget(amount=900000000.0, unit='bytes'))
    """

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str | float | Budget) -> Budget:
        """Read a budget; a bare number is one of bits per weight."""
        if isinstance(text, Budget):
            return text
        given = str(text).strip()
        found = re.fullmatch(r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*(bpw|nats|dB|)", given)
        if found is None:
            return cls(float(_bytes_of(given)), "bytes")
        amount, unit = float(found[1]), found[2] or "bpw"
        if unit != "dB" and amount <= 0:
            raise _no_budget(given)
        return cls(amount, unit)  # type: ignore[arg-type]  # one of those in the pattern

    @property
    def limits_size(self) -> bool:
        """Whether it is a limit of size, and not of error."""
        return self.unit in ("bpw", "bytes")

    def as_bytes(self, weights: int) -> float:
        """Return the limit of the size of so many weights."""
        return self.amount if self.unit == "bytes" else self.amount * weights / 8

    def as_harm(self) -> float:
        """Return the limit of what is lost: nats, or a mean of squared relative errors."""
        return self.amount if self.unit == "nats" else error_of_decibels(self.amount) ** 2

    def __str__(self) -> str:
        if self.unit == "bytes":
            return f"{self.amount:,.0f} bytes"
        return f"{self.amount:g} {self.unit}"


def _bytes_of(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigurationError as error:
        raise _no_budget(text) from error


def _no_budget(text: str) -> ConfigurationError:
    return ConfigurationError("is no budget", subject=Option("budget", text), hint=_EXAMPLES)
