"""What speed.py runs in processes of their own: ``python speed_jobs.py SECTION SETTINGS``.

The environment holds the instruction set, of Calipers and of torch, before either is imported.
The last line that is printed is the result.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import speed_cases as cases
import torch
from agreement import DTYPES, FORMATS
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.observers import Observer as Peer
from racing import Prepare, calling, race, seconds_of_others, with_threads
from speed_cases import Case, Optimum
from tables import Goal, Row, judged
from torch import Tensor

from calipers import Observer
from calipers.kernels import describe
from calipers.kernels.reductions import count_values, extrema, sum_of_squares
from calipers.numerics.layout import Layout

CALLS = 3  # of ours in each round
PRODUCT = 2048  # rows and columns of the matrix product
PASSES: tuple[tuple[torch.dtype, Callable[[Tensor], Tensor]], ...] = (
    (torch.int32, torch.amax),
    (torch.float32, torch.sum),
    (torch.int64, torch.sum),
)


def main() -> int:
    """Measure one section, and print it with what other programs used of the machine meanwhile."""
    name, settings = sys.argv[1], Namespace(**json.loads(sys.argv[2]))
    torch.set_num_threads(settings.threads)
    started, used = time.perf_counter(), seconds_of_others()
    rows = list(SECTIONS[name](settings))
    used = max(0.0, seconds_of_others() - used)  # ticks are coarse: a little may be missing
    found = {
        "rows": rows,
        "cores_used_by_others": used / (time.perf_counter() - started),
        "kernels": describe().instruction_set or "torch",
        "torch": torch.backends.cpu.get_cpu_capability(),
    }
    print(json.dumps(found))
    return 0


# What takes part in a race


def ours(case: Case, weight: Tensor) -> list[Prepare]:
    """Let our observer see a weight, several times a round."""
    return [observing(Observer, case, weight)] * CALLS


def theirs(case: Case, weight: Tensor) -> list[Prepare]:
    """Let the peer's observer see a weight."""
    return [observing(Peer, case, weight)]


def observing(library: Any, case: Case, weight: Tensor) -> Prepare:
    """Observe a weight with a new observer, which has gathered importance if it uses any."""

    def prepare() -> Callable[[], object]:
        observer = case.build(library)
        if case.observer in ("imatrix_mse", "optimal"):
            gather_importance(observer, weight.shape[-1])
        return partial(observer, weight)

    return prepare


def gather_importance(observer: Any, channels: int) -> None:
    """Let a few inputs pass by."""
    linear = torch.nn.Linear(channels, 1)
    observer.attach(linear)
    linear(torch.randn(16, channels, generator=torch.Generator().manual_seed(0)))
    observer.detach(linear)


def passes(values: Tensor) -> list[Prepare]:
    """Read all of the memory once, in several ways."""
    flat = values.view(-1)
    return [calling(reduce, flat.view(dtype)) for dtype, reduce in PASSES]


def draw(size: int, dtype: str) -> Tensor:
    """Draw a square matrix like a weight."""
    torch.manual_seed(0)
    return (torch.randn(size, size) * 0.02).to(DTYPES[dtype])


def sizes_around(size: int, least: int = 0) -> list[int]:
    """Return the sizes up to twice the one that is asked for."""
    return sorted({size, *(each for each in cases.SIZES if least <= each <= 2 * size)})


def in_seconds(found: Mapping[str, float]) -> Row:
    """Name times by their unit."""
    return {f"{name}_seconds": value for name, value in found.items()}


def ratio(found: Mapping[str, float], above: str, below: str) -> float | None:
    """Divide two times; None if one was not measured."""
    return found[above] / found[below] if above in found and below in found else None


# Sections


def measure_extrema(settings: Namespace) -> Iterator[Row]:
    """Time min-max of every strategy."""
    for dtype in ("fp32", "bf16"):
        weights = [draw(size, dtype) for size in sizes_around(settings.size)]
        for strategy, case in cases.STRATEGIES.items():
            for weight in weights:
                if case.fits(len(weight)):
                    about = {"observer": case.observer, "strategy": strategy, "dtype": dtype}
                    yield extrema_row(about, case, weight, settings.quick)


def extrema_row(about: Row, case: Case, weight: Tensor, quick: bool) -> Row:
    """Time min-max of one weight: beside the peer, and beside a memory pass if it is not tiny."""
    size = len(weight)
    lanes = {"ours": ours(case, weight), "peer": theirs(case, weight)}
    if size >= cases.LEAST_SIZE:
        pieces = Layout.of("weight", case.build(Observer).args).pieces(weight)
        lanes |= {"pass": passes(weight), "kernel": [calling(extrema, pieces)] * CALLS}
    found = race(lanes, quick)
    row = {
        **about,
        "size": size,
        **in_seconds(found),
        "times_faster": ratio(found, "peer", "ours"),
        "ours_to_pass": ratio(found, "ours", "pass"),
        "kernel_to_pass": ratio(found, "kernel", "pass"),
    }
    goals = [cases.faster(1)] if size >= cases.LEAST_SIZE else []
    goals += [cases.passes(1.5)] if size >= cases.LEAST_SIZE_OF_PASSES else []
    return judged(row, goals)


def measure_searches(settings: Namespace) -> Iterator[Row]:
    """Time the searches, and judge all of them by the fastest matrix product."""
    raced: list[tuple[Row, tuple[Goal, ...]]] = []
    for dtype in ("fp32", "bf16"):
        weight = draw(settings.size, dtype)
        for case in cases.SEARCHES:
            row = {"dtype": dtype, **search_row(case, weight, settings.quick)}
            raced.append((row, case.goals.get(dtype, ())))
    rate = PRODUCT**3 / min(row["product_seconds"] for row, _ in raced)
    for row, goals in raced:
        limit = settings.size**2 * row["candidates"] * row["operations"] / rate
        against = {"limit_seconds": limit, "ours_to_limit": row["ours_seconds"] / limit}
        yield judged({**row, "fmas_per_second": rate, **against}, goals)


def search_row(case: Case, weight: Tensor, quick: bool) -> Row:
    """Time one search beside the peer and a matrix product."""
    search, factor = case.build(Observer).options, draw(PRODUCT, "fp32")
    lanes = {
        "product": [calling(torch.mm, factor, factor)],
        "ours": ours(case, weight),
        "peer": theirs(case, weight),
    }
    if quick and case.observer == cases.SLOW_PEER:
        del lanes["peer"]
    found = race(lanes, quick)
    return {
        "observer": case.observer,
        "format": case.format,
        "norm": search.norm,
        "size": len(weight),
        "candidates": len(search.factors),
        "operations": operations(case, search.norm),
        **in_seconds(found),
        "times_faster": ratio(found, "peer", "ours"),
    }


def operations(case: Case, norm: float) -> int:
    """Count the arithmetic of one value and candidate, as the head of speed.py says."""
    code = 7 if FORMATS[case.format].get("type") == "float" else 4
    return code + {2.0: 1, 3.0: 3}.get(norm, 11) + (case.observer == "imatrix_mse")


def measure_optima(settings: Namespace) -> Iterator[Row]:
    """Time the search of all storable scales beside searches of a few candidates."""
    weights = {dtype: draw(settings.size, dtype) for dtype in ("bf16", "fp32")}
    for optimum in cases.OPTIMA:
        yield from optimum_rows(optimum, weights, settings.quick)


def optimum_rows(optimum: Optimum, weights: Mapping[str, Tensor], quick: bool) -> Iterator[Row]:
    """Race the optima of one format, the search of the peer, and ours with its defaults."""
    kinds = [("bf16", importance) for importance in ("none", "imatrix", "hessian")]
    kinds += [("fp32", importance) for importance in ("none", "imatrix") if optimum.floats]
    plain = Case("memoryless_mse", optimum.format)
    lanes = {"peer bf16": theirs(Case(optimum.peer, optimum.format), weights["bf16"])}
    for dtype, weight in weights.items():
        lanes[f"search {dtype}"] = [observing(Observer, plain, weight)]
    for dtype, importance in kinds:
        best = Case("optimal", optimum.format, {"importance": importance})
        lanes[f"{importance} {dtype}"] = [observing(Observer, best, weights[dtype])]
    if quick and optimum.peer == cases.SLOW_PEER:
        del lanes["peer bf16"]
    found = race(lanes, quick)
    for dtype, importance in kinds:
        yield optimum_row(optimum, dtype, importance, found, len(weights[dtype]))


def optimum_row(
    optimum: Optimum, dtype: str, importance: str, found: Mapping[str, float], size: int
) -> Row:
    """Put the times of one optimum together, and judge it."""
    lane, floats = f"{importance} {dtype}", dtype == "fp32"
    row = {
        "format": optimum.format,
        "importance": importance,
        "dtype": dtype,
        "size": size,
        "peer": None if floats else optimum.peer,
        "ours_seconds": found[lane],
        "search_seconds": found[f"search {dtype}"],
        "peer_seconds": found.get(f"peer {dtype}"),
        "bf16_seconds": found[f"{importance} bf16"] if floats else None,
        "times_faster": ratio(found, f"peer {dtype}", lane),
        "ours_to_search": ratio(found, lane, f"search {dtype}"),
        "ours_to_bf16": ratio(found, lane, f"{importance} bf16") if floats else None,
    }
    goals = optimum.peers + (optimum.ours if importance != "hessian" else ())
    return judged(row, (cases.FLOATS_GOAL,) if floats else goals)


def measure_statistics(settings: Namespace) -> Iterator[Row]:
    """Time what is gathered of activations."""
    layout = Layout.of("input", QuantizationArgs(num_bits=8, strategy="tensor"))
    for dtype in DTYPES:
        tokens = draw(settings.size, dtype)
        for kernel, values, goals in (
            (sum_of_squares, tokens, cases.SUM_GOALS),
            (count_values, layout.pieces(tokens), cases.COUNT_GOALS),
        ):
            found = race({"pass": passes(tokens), "ours": [calling(kernel, values)] * CALLS})
            row = {
                "kernel": kernel.__name__,
                "dtype": dtype,
                "size": settings.size,
                **in_seconds(found),
                "ours_to_pass": ratio(found, "ours", "pass"),
            }
            yield judged(row, goals.get(dtype, ()))


def measure_growth(settings: Namespace) -> Iterator[Row]:
    """Time searches of ever larger weights; where it must be quick, without the slowest peers."""
    weights = {size: draw(size, "fp32") for size in sizes_around(settings.size, cases.LEAST_SIZE)}
    for case in cases.GROWING:
        lanes = {f"ours {size}": ours(case, weight) for size, weight in weights.items()}
        for size, weight in weights.items():
            if size <= settings.size or not settings.quick:
                lanes[f"peer {size}"] = theirs(case, weight)
        found = race(lanes, settings.quick)
        for size in weights:
            yield {
                "subject": title(case),
                "dtype": "fp32",
                "size": size,
                "ours_seconds": found[f"ours {size}"],
                "peer_seconds": found.get(f"peer {size}"),
                "times_faster": ratio(found, f"peer {size}", f"ours {size}"),
                "seconds_per_value": found[f"ours {size}"] / size**2,
            }


def measure_threads(settings: Namespace) -> Iterator[Row]:
    """Time one thread, and all of them."""
    weight = draw(settings.size, "fp32")
    for name, subject in subjects(cases.THREADED).items():
        lanes = {
            lane: [with_threads(count, prepare) for prepare in subject(weight)]
            for lane, count in (("one_thread", 1), ("all_threads", settings.threads))
        }
        found = race(lanes)
        yield {
            "subject": name,
            "dtype": "fp32",
            "size": settings.size,
            "threads": settings.threads,
            **in_seconds(found),
            "times_faster": ratio(found, "one_thread", "all_threads"),
        }


def subjects(chosen: Iterable[Case]) -> dict[str, Callable[[Tensor], list[Prepare]]]:
    """Return what is timed on several threads: our observers, and a pass to compare."""
    return {**{title(case): partial(ours, case) for case in chosen}, "one memory pass": passes}


def title(case: Case) -> str:
    """Name a case."""
    return f"{case.observer} {case.format}"


SECTIONS: dict[str, Callable[[Namespace], Iterator[Row]]] = {
    "min-max": measure_extrema,
    "searches": measure_searches,
    "optima": measure_optima,
    "sums-and-counts": measure_statistics,
    "growth": measure_growth,
    "threads": measure_threads,
}


if __name__ == "__main__":
    sys.exit(main())
