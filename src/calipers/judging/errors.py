"""What an error is: one function for each notion. docs/judging.md has the formulas side by side."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(lost: float, whole: float) -> float:
    """Return ‖error‖ / ‖whole‖ from sums of squares; 0 where there is nothing to lose.

    >>> relative_error(0.01, 1.0)
    0.1
    """
    return math.sqrt(lost / whole) if whole else 0.0


def combined_error(by_weight: float, by_input: float) -> float:
    """Return the relative error of an output, √(by_weight² + by_input²).

    The rounding errors of a weight and of its input are independent and have a mean of about zero:
    the expectation of their product vanishes, so that energies add up. This is the error of a
    module wherever Calipers names one.

    >>> combined_error(0.03, 0.04)
    0.05
    """
    return math.hypot(by_weight, by_input)


def decibels(error: float | None) -> float | None:
    """Return a relative error in dB: 0 is all, −20 a tenth, −40 a hundredth; None for no error.

    >>> decibels(0.1), decibels(0.0), decibels(None)
    (-20.0, None, None)
    """
    return 20 * math.log10(error) if error else None


def error_of_decibels(level: float) -> float:
    """Return the relative error that a level in dB stands for.

    >>> error_of_decibels(-20.0)
    0.1
    """
    return float(10 ** (level / 20))


def format_decibels(error: float | None) -> str:
    """Return a relative error in dB as text.

    >>> format_decibels(0.1), format_decibels(0.9999), format_decibels(None)
    ('−20.0 dB', '0.0 dB', '–')
    """
    level = decibels(error)
    # Adding 0 makes a rounded −0.0 a 0.0; the sign is that of mathematics, not a hyphen.
    return "–" if level is None else f"{round(level, 1) + 0.0:.1f} dB".replace("-", "−")


def token_errors(values: Tensor, expected: Tensor) -> Tensor:
    """Return ‖values − expected‖ / ‖expected‖ of each token: vectors along the last dimension.

    Infinite where nothing was expected and there is something.
    """
    expected, values = expected.float(), values.to(expected.device).float()
    norm = torch.linalg.vector_norm(expected, dim=-1)
    error = torch.linalg.vector_norm(values - expected, dim=-1)
    return torch.where(error > 0, error / norm, 0.0).double()
