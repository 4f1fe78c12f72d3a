"""Whether ``Measurements.sufficiency`` is right: what it predicts, and what more data really moves.

Of stories15M, 16, 64 and 256 samples are measured, and 512 others. The movement that halves of the
few predict is compared with the difference to what the others tell: of the scale of static_minmax,
of that of histogram_mse (int8), and of E[x²]. Then a run over the 512 may stop by itself, and what
it has found is compared with all of them.

    python benchmarks/sufficiency.py --seed 0
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from racing import seconds_of_others
from rich.console import Console
from stories import load_model, load_tokenizer, shared_folder
from tables import Column, Measured, Row, Section, show

import calipers
from calipers import Measurements
from calipers.measurements.sufficiency import TOLERANCE, least_error_scale

SIZES = (16, 64, 256)
OTHERS = 512


def main() -> int:
    """Print what was predicted and what was found, and where a run stops by itself."""
    options = parse_arguments()
    warnings.simplefilter("ignore", calipers.errors.CalipersWarning)
    console = Console(width=124, highlight=False)
    started, used = time.perf_counter(), seconds_of_others()
    texts = shuffled_texts(options.seed)
    model, tokenizer = load_model(), load_tokenizer()

    def measure(chosen: Sequence[str], **more: Any) -> Measurements:
        return calipers.measure(
            model,
            chosen,
            tokenizer=tokenizer,
            num_samples=len(chosen),
            shuffle=False,
            progress=False,
            **more,
        )

    others = measure(texts[SIZES[-1] : SIZES[-1] + OTHERS])
    rows: list[Row] = []
    known: Measurements | None = None
    for start, end in pairwise((0, *SIZES)):
        part = measure(texts[start:end])
        known = part if known is None else known.merge(part)
        rows.extend(compared(known, others, OTHERS / end))
    stopped = measure(texts[SIZES[-1] : SIZES[-1] + OTHERS], until_stable=True)
    used = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
    show(console, PREDICTED, Measured(rows, used))
    show(console, STOPPED, Measured(list(within(stopped, others)), used))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Whether predictions of sufficiency are right.")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the stories")
    return parser.parse_args()


def shuffled_texts(seed: int) -> list[str]:
    """Return all stories in an order of chance."""
    folder = shared_folder() / "text"
    files = [folder / f"stories-{name}.jsonl" for name in ("calibration", "evaluation")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    texts = list(dict.fromkeys(str(json.loads(line)["text"]) for line in lines))
    random.Random(seed).shuffle(texts)
    return texts


class Kind(NamedTuple):
    """A result that is compared: of which statistic, and how far two of them are apart."""

    name: str
    key: str
    apart: Callable[[Any, Any], float]
    predicted: Callable[[float, float], float]


def magnitude(extrema: Any) -> float:
    """Return the largest magnitude of all values."""
    return max(-float(extrema.min_vals.min()), float(extrema.max_vals.max()), 0.0)


def energy_shares(squares: Any) -> torch.Tensor:
    """Return the share of Σx² that each channel has."""
    sums: torch.Tensor = squares.fields()["_imatrix_sum"]
    return sums / sums.sum()


def _scales_apart(scale: Callable[[Any], float]) -> Callable[[Any, Any], float]:
    return lambda one, other: abs(scale(one) / scale(other) - 1)


def _of_error(error: float, times: float) -> float:
    return error * math.sqrt(1 + 1 / times)  # the others are not exact either


KINDS = (
    Kind(
        "minmax",
        "extrema",
        _scales_apart(magnitude),
        lambda growth, times: growth * max(1.0, math.log2(times)),
    ),
    Kind("mse", "counts", _scales_apart(least_error_scale), _of_error),
    Kind(
        "importance",
        "squares",
        lambda one, other: float((energy_shares(one) - energy_shares(other)).abs().sum()),
        _of_error,
    ),
)


def differences(few: Measurements, many: Measurements, kind: Kind) -> list[float]:
    """Return how far the results of each tensor are apart."""
    one, other = few.tensors(), many.tensors()
    places = (tuple(e.tensor.rsplit(".", 1)) for e in few.sufficiency().tensors)
    return [kind.apart(one[p][kind.key], other[p][kind.key]) for p in places]  # type: ignore[index]


def compared(few: Measurements, many: Measurements, times: float) -> Iterator[Row]:
    """Give what was predicted from few samples, and what many others tell."""
    found = few.sufficiency()
    for kind in KINDS:
        predicted = [kind.predicted(getattr(e, kind.name), times) for e in found.tensors]
        real = differences(few, many, kind)
        pairs = list(zip(predicted, real, strict=True))
        yield {
            "samples": found.samples,
            "needed": found.needed_samples,
            "kind": kind.name,
            "predicted": _median(predicted),
            "real": _median(real),
            "most": max(real),
            "rank_correlation": _rank_correlation(predicted, real),
            "within": sum(r <= 2 * p for p, r in pairs) / len(pairs),
        }


def within(stopped: Measurements, whole: Measurements) -> Iterator[Row]:
    """Give how many results of a run that stopped are within the tolerance of all data."""
    samples = stopped.sufficiency().samples
    for kind in KINDS:
        real = differences(stopped, whole, kind)
        yield {
            "samples": samples,
            "kind": kind.name,
            "real": _median(real),
            "most": max(real),
            "within": sum(each <= TOLERANCE for each in real) / len(real),
        }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = [torch.tensor(each).argsort().argsort().double() for each in (one, other)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


_PERCENT = "{:.2%}".format
PREDICTED = Section(
    lambda _: [],
    "Movement as predicted from halves, and the difference to 512 other samples",
    (
        Column("samples", "samples"),
        Column("needed", "needed", str, "samples that are said to suffice; – if unknown."),
        Column("of", "kind"),
        Column("predicted", "predicted", _PERCENT, "median over tensors."),
        Column("real", "real", _PERCENT, "median over tensors."),
        Column("most", "most", _PERCENT, "the largest real difference."),
        Column("ρ", "rank_correlation", "{:.2f}".format, "rank correlation over tensors."),
        Column("within 2×", "within", "{:.0%}".format, "tensors that move no more than that."),
    ),
)
STOPPED = Section(
    lambda _: [],
    "A run over at most 512 samples that stops by itself, against all of them",
    (
        Column("samples", "samples", str, "after which it stopped."),
        Column("of", "kind"),
        Column("real", "real", _PERCENT, "median over tensors."),
        Column("most", "most", _PERCENT, "the largest difference."),
        Column(
            "within", "within", "{:.0%}".format, f"tensors within the tolerance, {TOLERANCE:.0%}."
        ),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
