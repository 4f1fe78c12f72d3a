"""What methods of quantization lose on text that nobody calibrated on, and the time they take.

GPTQ and AWQ of llm-compressor, AutoRound, and methods of Calipers, on the same schemes and the same
calibration data, in the same order, in the same run. Models are bfloat16, as their checkpoints are,
and are judged in float32, in nats lost: the mean over tokens of the cross-entropy, minus that of
the float model. Intervals (95 %) come from the paired bootstrap over samples.

Every result is saved as soon as it is there: a run that was stopped, or that runs other contenders,
keeps what an earlier one has measured, as long as it would measure the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import AUTO_ROUND, OURS
from figures import FLOAT, bootstrap, figures_of, mean, with_margin, with_rough_margin
from quantizers import METHODS, Method
from racing import seconds_of_others
from rich.console import Console
from scatter import Point, svg
from stories import losses, predicted
from tables import Column, Row, mark, table, trust
from texts import CALIBRATION, DEMO, JUDGED, SCHEMES, STORIES, Subject, Texts, spaced

from calipers.evaluation.bootstrap import Bootstrap, Estimate

QUICK, QUICK_SCHEMES = 50, ("W3A16-g32", "W4A16")  # samples of each text
FOLDER = Path(__file__).parent / "results"
SECTIONS = {"methods": STORIES, "methods-half": STORIES.halved(), "methods-demo": DEMO}


class Aim(NamedTuple):
    """What is asked of our methods: at most so many times what the best of some others loses.

    :param names: which others; none: all
    """

    names: tuple[str, ...]
    ordinary: float
    signed: float | None = None


ROUNDED = Aim(("autoround",), 0.95, 0.80)
AIMS = {
    "W4A16-g96": ROUNDED,
    "W4A16-g32": ROUNDED,
    "W3A16-g32": ROUNDED,
    "W4A16": Aim(("autoround",), 1.0, 0.9),
    "NVFP4A16": Aim((), 0.68),
    "MXFP4A16": Aim((), 0.80),
}


@dataclass
class Results:
    """What was measured of a subject, in a file: scheme → method → entry."""

    path: Path
    entries: dict[str, dict[str, Row]] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> Results:
        """Read what is there."""
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def get(self, scheme: str, method: str, identity: str) -> Row | None:
        """Return an entry, if it was measured of what would be measured now."""
        found = self.entries.get(scheme, {}).get(method)
        return found if found is not None and found["identity"] == identity else None

    def put(self, scheme: str, method: str, entry: Row) -> None:
        """Keep an entry, and write the file, with what other processes have measured meanwhile."""
        if self.path.exists():
            self.entries = json.loads(self.path.read_text())
        self.entries.setdefault(scheme, {})[method] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(self.entries) + "\n")
        written.replace(self.path)


@dataclass
class Bench:
    """A subject, what methods of it were measured, and where that is kept.

    :param judges: the samples of each text that methods are judged on
    """

    subject: Subject
    texts: Texts
    judges: Texts
    results: Results
    console: Console
    again: bool

    def chosen(self, scheme: str, names: Sequence[str] | None) -> list[Method]:
        """Return the methods that are to be measured."""
        args = SCHEMES[scheme].weights
        assert args is not None
        suit = [method for method in METHODS if method.suits(args)]
        return [each for each in suit if (each.key in names if names else each.is_usual)]

    def base(self) -> Row:
        """Return what the float model loses."""
        identity = self.identity("float")
        found = self.results.get("float", FLOAT, identity)
        if found is None:
            found = {"identity": identity, "losses": self.judged(self.subject.load())}
            self.results.put("float", FLOAT, found)
        return found

    def measured(self, scheme: str, method: Method, run: bool = True) -> Row | None:
        """Measure a method, unless that was done before; None where it is not to run, or fails."""
        identity = self.identity(method.identity())
        found = self.results.get(scheme, method.key, identity)
        if not run or (found is not None and not self.again):
            return found
        args, data = SCHEMES[scheme].weights, self.texts[CALIBRATION]
        assert args is not None
        started, used, cpu = time.perf_counter(), seconds_of_others(), time.process_time()
        try:
            model = method.run(self.subject.load(), args, data, self.subject.tokenizer())
        except Exception as error:  # another library may refuse a scheme: the others still run
            told = f"{type(error).__name__}: {error}"
            self.console.print(f"  {method.key} failed: {told}", style="red", markup=False)
            return None
        seconds = time.perf_counter() - started
        others = max(0.0, seconds_of_others() - used) / seconds
        cpu = time.process_time() - cpu
        timing = {"seconds": seconds, "cpu_seconds": cpu, "cores_used_by_others": others}
        entry = {"identity": identity, **timing, "losses": self.judged(model)}
        self.results.put(scheme, method.key, entry)
        return entry

    def judged(self, model: Any) -> dict[str, list[float]]:
        """Return the losses of a model on all texts."""
        model = model.float().eval()
        return {text: losses(model, samples) for text, samples in self.judges.items()}

    def identity(self, what: str) -> str:
        """Return what changes when something else would be measured."""
        data = self.texts[CALIBRATION]
        counts = [
            (len(samples), sum(predicted(samples))) for samples in (data, *self.judges.values())
        ]
        return f"{what}; torch {version('torch')}; {torch.get_num_threads()} threads; {counts}"


def measure_methods(console: Console, section: str, options: argparse.Namespace) -> list[Row]:
    """Judge methods on a subject, and print each scheme as soon as it is done."""
    subject = SECTIONS[section]
    limit = options.stories or (QUICK if options.quick else None)
    texts = subject.texts()
    judges = {name: spaced(each, limit or len(each)) for name, each in texts.items()}
    name = f"{section}-{limit}" if limit else section
    results = Results.at(FOLDER / f"{name}.json")
    bench = Bench(subject, texts, judges, results, console, options.again)
    schemes = options.schemes or (QUICK_SCHEMES if options.quick else subject.schemes)
    rows = []
    for scheme in (each for each in subject.schemes if each in schemes):
        rows += measure_scheme(bench, scheme, options.contenders)
    if rows:
        plot = results.path.with_suffix(".svg")
        plot.write_text(svg(panels(rows), "seconds", "nats lost on text of others"))
        console.print(f"Every sample is in {results.path}, the plot is {plot}.\n")
    return [plain(row) for row in rows]


def measure_scheme(bench: Bench, scheme: str, names: Sequence[str] | None) -> list[Row]:
    """Judge methods on a scheme, those that are chosen and those that are known already."""
    console, found = bench.console, {FLOAT: bench.base()}
    chosen = bench.chosen(scheme, names)
    for method in METHODS:
        entry = bench.measured(scheme, method, run=method in chosen)
        if entry is not None:
            found[method.key] = entry
            console.print(f"  {scheme} {method.key} {entry['seconds']:.0f} s", style="dim")
    tokens = {text: predicted(samples) for text, samples in bench.judges.items()}
    drawn = bootstrap(tokens, {name: entry["losses"] for name, entry in found.items()})
    best = best_other(drawn, scheme, list(found))
    rows: list[Row] = [
        {"subject": bench.subject.name, "scheme": scheme, "key": method.key}
        | {"library": method.library, "method": str(method), "is_signed": method.is_signed}
        | {name: value for name, value in found[method.key].items() if name != "losses"}
        | figures_of(drawn, method.key, list(tokens), best)
        for method in METHODS
        if method.key in found
    ]
    judge(rows, AIMS[scheme])
    base = ", ".join(
        f"{text} {sum(found[FLOAT]['losses'][text]) / sum(counts):.4f}"
        for text, counts in tokens.items()
    )
    console.print(f"{bench.subject.name}, {scheme}: nats of the float model: {base}", style="bold")
    console.print(table(columns(list(tokens), best), rows))
    if rows:
        console.print(f"{trust(max(float(row['cores_used_by_others']) for row in rows))}\n")
    return rows


def best_other(drawn: Bootstrap, scheme: str, measured: Sequence[str]) -> str | None:
    """Return which method of others our methods are held against; None if none was measured."""
    names = AIMS[scheme].names or [each.key for each in METHODS if each.library != OURS]
    present = [name for name in names if name in measured]
    return min(present, key=lambda name: drawn.estimate(mean(name, JUDGED)).value, default=None)


def judge(rows: Sequence[Row], aim: Aim) -> None:
    """Say of our methods what is asked of them, and whether they reach it."""
    others = [row for row in rows if row["library"] == AUTO_ROUND]
    for row in rows:
        allowed = aim.signed if row["is_signed"] else aim.ordinary
        if row["library"] != OURS or "ratio" not in row or allowed is None:
            continue
        row["allowed"], row["reached"] = allowed, row["ratio"].value <= allowed
        if others:
            row["gap_reached"] = row["gap"].value <= others[0]["gap"].value


def columns(texts: Sequence[str], best: str | None) -> tuple[Column, ...]:
    """Return the columns of a table."""
    beside = (
        Column(f"÷ {best}", "ratio", with_rough_margin),
        Column("at most", "allowed", "{:.2f}".format),
        Column("", "reached", mark),
    )
    return (
        Column("method", "key"),
        *(Column(text, text, with_margin) for text in texts),
        Column("judged", "judged", with_margin),
        Column("gap", "gap", with_rough_margin),
        Column("", "gap_reached", mark),
        Column("wide gap", "wide_gap", with_rough_margin),
        *(beside if best else ()),
        Column("s", "seconds", "{:.0f}".format),
    )


def panels(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Return what is drawn of each scheme: what is lost against the time it takes."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        point = Point(row["key"], row["library"], row["seconds"], row["judged"].value)
        found.setdefault(row["scheme"], []).append(point)
    return found


def plain(row: Row) -> Row:
    """Return a row that JSON can hold."""
    return {
        name: value.as_dict() if isinstance(value, Estimate) else value
        for name, value in row.items()
    }
