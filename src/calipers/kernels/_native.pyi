"""The C++ kernels. Tensors come as (observations, grid rows, grid columns, rows, columns)."""

from collections.abc import Sequence

from torch import Tensor

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use(name: str) -> None: ...
def grids() -> list[str]: ...
def extrema(
    values: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
    low: int,
    high: int,
    missing: int,
    threads: int,
) -> int: ...
def search(
    values: Tensor,
    low: Tensor,
    high: Tensor,
    factors: Tensor,
    grid: str,
    lowest: float,
    highest: float,
    norm: float,
    weights: Tensor | None,
    scale: str,
    shifted: bool,
    scales: Tensor | None,
    zero_points: Tensor | None,
    patience: int,
    best: Tensor,
    done: Tensor | None,
    least: Tensor | None,
    improved: Tensor,
    threads: int,
) -> None: ...
def scale_ranges(
    low: Tensor,
    high: Tensor,
    factors: Tensor,
    best: Tensor,
    start: Tensor,
    end: Tensor,
    threads: int,
) -> None: ...
def sum_of_squares_chunks(tokens: int) -> int: ...
def sum_of_squares(values: Tensor, mask: Tensor | None, sums: Tensor, threads: int) -> None: ...
def summarize_channels(
    values: Tensor,
    mask: Tensor | None,
    sums: Tensor,
    ranges: Tensor,
    counts: Tensor | None,
    threads: int,
) -> bool: ...
def count_values(values: Tensor, counts: Tensor, threads: int) -> None: ...
def quantize_chunks(values: Tensor) -> int: ...
def quantize(
    values: Tensor,
    weights: Tensor | None,
    scales: Tensor,
    zero_points: Tensor | None,
    working: str,
    grid: str,
    lowest: float,
    highest: float,
    norm: float,
    output: Tensor | None,
    errors: Tensor,
    threads: int,
) -> None: ...
def optimum(
    values: Tensor,
    weights: Tensor | None,
    low: Tensor,
    high: Tensor,
    storable: Tensor,
    halvable: float,
    windows: Tensor,
    shifted: bool,
    grid: str,
    norm: float,
    most: float,
    best: Tensor,
    window: Tensor,
    errors: Tensor,
    threads: int,
) -> None: ...
def sweep(
    values: Tensor,
    weights: Tensor | None,
    low: Tensor,
    high: Tensor,
    windows: Tensor,
    magnitudes: Tensor,
    best: Tensor,
    window: Tensor,
    errors: Tensor,
    threads: int,
) -> None: ...
def feed_back(
    adjusted: Tensor,
    target: Tensor,
    factor: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor,
    grid: str,
    lowest: float,
    highest: float,
    begin: int,
    result: Tensor,
    errors: Tensor,
    threads: int,
) -> None: ...
def descend(
    values: Tensor,
    pulls: Tensor,
    hessian: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor,
    grid: str,
    lowest: float,
    highest: float,
    sweeps: int,
    block: int,
    least_gain: float,
    threads: int,
) -> int: ...
def choose_together(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    own: Tensor,
    across: Tensor,
    grid: str,
    lowest: float,
    highest: float,
    rounds: int,
    choice: Tensor,
    threads: int,
) -> None: ...
def pack(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor,
    height: int,
    width: int,
    working: str,
    grid: str,
    lowest: float,
    highest: float,
    offset: float,
    bits: int,
    packed: Tensor,
    threads: int,
) -> bool: ...
