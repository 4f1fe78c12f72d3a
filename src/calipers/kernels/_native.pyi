"""The C++ kernels. Tensors come as (observations, grid rows, grid columns, rows, columns)."""

from collections.abc import Sequence

from torch import Tensor

class Numbers:
    def __init__(self, grid: str, lowest: float, highest: float) -> None: ...

class RangeFactors:
    def __init__(self, *, low: Tensor, high: Tensor, factors: Tensor) -> None: ...

class ScaleChoice:
    def __init__(
        self,
        *,
        source: str,
        shifted: bool,
        scales: Tensor | None = None,
        zero_points: Tensor | None = None,
    ) -> None: ...

class Progress:
    def __init__(
        self,
        *,
        patience: int,
        best: Tensor,
        done: Tensor | None,
        least: Tensor | None,
        improved: Tensor,
    ) -> None: ...

class ScaleSearch:
    def __init__(
        self,
        *,
        values: Tensor,
        weights: Tensor | None,
        low: Tensor,
        high: Tensor,
        windows: Tensor,
        best: Tensor,
        window: Tensor,
        errors: Tensor,
    ) -> None: ...

class Rounder:
    def __init__(
        self, *, scales: Tensor, zeros: Tensor | None, groups: Tensor, numbers: Numbers
    ) -> None: ...

class Blocks:
    def __init__(self, *, scales: Tensor, zeros: Tensor, height: int, width: int) -> None: ...

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use(name: str) -> None: ...
def grids() -> list[str]: ...
def extrema(
    values: Tensor,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
    low: Tensor,
    high: Tensor,
    missing: Tensor | None,
    threads: int,
) -> int: ...
def search(
    *,
    values: Tensor,
    weights: Tensor | None,
    ranges: RangeFactors,
    numbers: Numbers,
    norm: float,
    scales: ScaleChoice,
    progress: Progress,
    threads: int,
) -> None: ...
def scale_ranges(
    *, ranges: RangeFactors, best: Tensor, start: Tensor, end: Tensor, threads: int
) -> None: ...
def optimum(
    search: ScaleSearch,
    *,
    storable: Tensor,
    halvable: float,
    most: float,
    grid: str,
    shifted: bool,
    norm: float,
    threads: int,
) -> None: ...
def sweep(search: ScaleSearch, *, magnitudes: Tensor, threads: int) -> None: ...
def sum_of_squares_chunks(tokens: int) -> int: ...
def sum_of_squares(*, values: Tensor, mask: Tensor | None, sums: Tensor, threads: int) -> None: ...
def summarize_channels(
    *,
    values: Tensor,
    mask: Tensor | None,
    sums: Tensor,
    ranges: Tensor,
    counts: Tensor | None,
    threads: int,
) -> bool: ...
def count_values(*, values: Tensor, counts: Tensor, threads: int) -> None: ...
def can_add_products() -> bool: ...
def add_products(
    *, left: Tensor, right: Tensor, total: Tensor, symmetric: bool, threads: int
) -> None: ...
def quantize_chunks(values: Tensor) -> int: ...
def quantize(
    *,
    values: Tensor,
    weights: Tensor | None,
    scales: Tensor,
    zero_points: Tensor | None,
    working: str,
    numbers: Numbers,
    norm: float,
    output: Tensor | None,
    errors: Tensor,
    threads: int,
) -> None: ...
def feed_back(
    *,
    adjusted: Tensor,
    target: Tensor,
    factor: Tensor,
    rounder: Rounder,
    begin: int,
    result: Tensor,
    errors: Tensor,
    threads: int,
) -> None: ...
def descend(
    *,
    values: Tensor,
    pulls: Tensor,
    hessian: Tensor,
    rounder: Rounder,
    sweeps: int,
    block: int,
    least_gain: float,
    threads: int,
) -> int: ...
def choose_candidates(
    *,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    own: Tensor,
    across: Tensor,
    numbers: Numbers,
    rounds: int,
    choice: Tensor,
    threads: int,
) -> None: ...
def pack(
    *,
    values: Tensor,
    blocks: Blocks,
    working: str,
    numbers: Numbers,
    offset: float,
    bits: int,
    packed: Tensor,
    threads: int,
) -> bool: ...
