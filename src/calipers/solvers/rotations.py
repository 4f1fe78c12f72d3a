"""Orthogonal matrices that spread what single channels hold over all of them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from calipers.errors import ConfigurationError

RotationKind = Literal["hadamard", "random-hadamard", "random-matrix"]


def hadamard(size: int) -> Tensor | None:
    """Return a matrix of ±1 with orthogonal rows; None where no construction here has that size.

    Sizes are 1, 2, p + 1 for primes p ≡ 3 (mod 4), 2p + 2 for primes p ≡ 1 (mod 4) (Paley 1933),
    and those times powers of two (Sylvester 1867).

    >>> [size for size in range(1, 41) if hadamard(size) is not None]
    [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    >>> matrix = hadamard(28)
    >>> bool((matrix @ matrix.T == 28 * torch.eye(28)).all())
    True
    """
    if size in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:size, :size]
    if size % 4:
        return None
    if (size - 1) % 4 == 3 and _is_prime(size - 1):
        skew = _bordered(size - 1, sign=-1.0)
        return skew + torch.eye(size, dtype=torch.float64)
    half = size // 2
    if (half - 1) % 4 == 1 and _is_prime(half - 1):
        symmetric, one = _bordered(half - 1, sign=1.0), torch.eye(half, dtype=torch.float64)
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(symmetric, pair) + torch.kron(one, other)
    smaller = hadamard(half)
    if smaller is None:
        return None
    return torch.cat([torch.cat([smaller, smaller], 1), torch.cat([smaller, -smaller], 1)])


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % each for each in range(2, int(number**0.5) + 1))


def _bordered(prime: int, sign: float) -> Tensor:
    """Return the conference matrix of a prime: its Jacobsthal matrix, bordered by ones."""
    symbols = torch.full((prime,), -1.0, dtype=torch.float64)
    symbols[torch.arange(1, prime) ** 2 % prime] = 1.0
    symbols[0] = 0.0
    index = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = symbols[(index[:, None] - index) % prime]
    return matrix


def rotation(kind: RotationKind, size: int, seed: int, what: str) -> Tensor:
    """Return an orthogonal matrix in float64, the same for the same seed.

    :param what: what has that size, for the error where there is no such matrix
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "random-matrix":
        gauss = torch.randn(size, size, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gauss)
        matrix: Tensor = q * r.diagonal().sign()
        return matrix
    signed = hadamard(size)
    if signed is None:
        raise ConfigurationError(
            f"no Hadamard matrix of size {size} is known here, which {what} has",
            hint="Sizes are powers of two, times 12, 20, 28, 36 and other 4·k. Choose a "
            "'transform_block_size' that divides it, or transform_type: random-matrix",
        )
    if kind == "random-hadamard":
        signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.float64) * 2 - 1
        signed = signed * signs[:, None]
    return signed.div(size**0.5)
