"""A benchmark that is one table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from racing import seconds_of_others
from rich.console import Console
from tables import Column, Row, table

from calipers.kernels import describe


def measure_and_print(
    columns: tuple[Column, ...], measure: Callable[[], list[Row]], threads: int, width: int = 100
) -> None:
    """Say which kernels run, measure, and print the rows and what other programs used."""
    torch.set_num_threads(threads)
    console = Console(width=width, highlight=False)
    console.print(str(describe()))
    used = seconds_of_others()
    console.print(table(columns, measure()))
    console.print(
        f"Meanwhile other programs used {seconds_of_others() - used:.1f} s of processors."
    )
