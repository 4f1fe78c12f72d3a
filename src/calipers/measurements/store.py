"""The statistics of a model, by module and tensor; independent of formats and solvers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import Self

from calipers.errors import CheckpointExistsError, MergeError, counted
from calipers.files.writing import OutputFile, check_output_file, output_file
from calipers.measurements.file_format import (
    decoded,
    digest_of_file,
    encoded,
    is_measurements,
    size_of,
)
from calipers.measurements.info import MeasurementsInfo
from calipers.measurements.sufficiency import (
    TOLERANCE,
    Sufficiency,
    check_tolerance,
    no_halves,
    sufficiency_of,
)
from calipers.measurements.summary import layer_grid, magnitudes_of
from calipers.measurements.tensors import (
    FOLDS,
    Halves,
    Place,
    Statistics,
    fold_of,
    halves_of,
    merged,
    name_of,
    num_folds,
    readers_of,
    whole_of,
)
from calipers.notebook import NotebookView
from calipers.statistics.base import Statistic

PEAKS = (4.0, 400.0)
"""max|x| ÷ rms at the ends of a scale: noise of four, and what a static int8 range cannot hold."""


class Measurements(NotebookView):
    """What was seen of the tensors of a model.

    A tensor may have several statistics, each under the key by which whoever needs it asks. Two
    keys of one tensor may stand for the same statistic. Those of :func:`calipers.measure` say of
    which model and which data they are: they can be saved, loaded and merged.
    """

    def __init__(self, info: MeasurementsInfo | None = None) -> None:
        self.info = info
        self._statistics: dict[str, dict[tuple[str, str], Statistic]] = {}
        self._needed: dict[str, list[Statistic]] = {}
        self._earlier: dict[str, list[Statistic]] = {}
        self._digest: str | None = None  # of the file that it is in

    def add(
        self,
        module: str,
        base_name: str,
        key: str,
        statistic: Statistic,
        *,
        is_optional: bool = False,
        is_from_earlier_run: bool = False,
    ) -> Statistic:
        """Keep a statistic, or return the one of equal configuration that the tensor has already.

        :param is_optional: whether the module counts as seen without it
        :param is_from_earlier_run: whether an earlier run has left what it knows
        """
        held = self._statistics.setdefault(module, {})
        for (tensor, other), known in held.items():
            is_same_data = tensor == base_name and fold_of(other) == fold_of(key)
            if is_same_data and known.configuration() == statistic.configuration():
                statistic = known
        assert held.get((base_name, key), statistic) is statistic, "one key, two statistics"
        held[base_name, key] = statistic
        if not is_optional:
            self._needed.setdefault(module, []).append(statistic)
        if is_from_earlier_run:
            self._earlier.setdefault(module, []).append(statistic)
        return statistic

    def replace(self, module: str, base_name: str, key: str, statistic: Statistic) -> None:
        """Put another statistic in the place of one."""
        self._statistics[module][base_name, key] = statistic

    def get(self, module: str, base_name: str, key: str) -> Statistic | None:
        """Return a statistic; None where there is none."""
        return self._statistics.get(module, {}).get((base_name, key))

    def of(self, modules: Iterable[str]) -> list[Statistic]:
        """Return the statistics of some modules, each once."""
        found = (s for name in modules for s in self._statistics.get(name, {}).values())
        return list({id(statistic): statistic for statistic in found}.values())

    def needed(self, module: str) -> list[Statistic]:
        """Return the statistics without which a module cannot be solved."""
        return self._needed.get(module, [])

    def tokens(self, module: str) -> int | None:
        """Return what the needed statistic that saw least has seen; None where none is needed."""
        return min((each.num_tokens for each in self.needed(module)), default=None)

    def is_from_earlier_run(self, module: str, statistic: Statistic) -> bool:
        """Whether an earlier run has left what a statistic of a module knows."""
        return any(each is statistic for each in self._earlier.get(module, ()))

    def divide(self, module: str, base_name: str, factors: Tensor) -> None:
        """Let what is known of a tensor be that of one whose channels were divided by factors.

        Statistics of which that is not known are forgotten.
        """
        held = self._statistics.get(module, {})
        for (tensor, key), statistic in list(held.items()):
            if tensor == base_name:
                del held[tensor, key]
                divided = statistic.divided_by(factors)
                if divided is not None:
                    held[tensor, key] = divided

    def forget(self, modules: Iterable[str]) -> None:
        """Let go of what was seen of some modules."""
        for name in modules:
            self._statistics.pop(name, None)
            self._needed.pop(name, None)
            self._earlier.pop(name, None)

    def forget_folds(self, modules: Iterable[str]) -> None:
        """Let go of what was seen of folds of the data, beside all of it."""
        for name in modules:
            held = self._statistics.get(name, {})
            for place in [each for each in held if fold_of(each[1])]:
                del held[place]

    # As a whole

    @classmethod
    def of_tensors(cls, info: MeasurementsInfo | None, tensors: Mapping[Place, Statistics]) -> Self:
        """Return measurements of which all statistics are known."""
        made = cls(info)
        for (module, base_name), statistics in tensors.items():
            for key, statistic in statistics.items():
                made._statistics.setdefault(module, {})[base_name, key] = statistic
                if not fold_of(key):
                    made._needed.setdefault(module, []).append(statistic)
        return made

    def tensors(self) -> dict[Place, dict[str, Statistic]]:
        """Return the statistics of all data: (module, tensor) → key → statistic."""
        return whole_of(self.with_folds())

    @property
    def has_halves(self) -> bool:
        """Whether halves of the data were measured apart; earlier versions of Calipers did not."""
        return any(fold_of(key) for held in self._statistics.values() for _, key in held)

    @property
    def num_folds(self) -> int:
        """How many folds of the data were measured apart; 1: none were."""
        return max(map(num_folds, self.with_folds().values()), default=1)

    def folds(self, module: str, base_name: str, key: str) -> list[Statistic]:
        """Return what is kept of folds of the data beside a statistic: of all but the last."""
        found = (self.get(module, base_name, prefix + key) for prefix in FOLDS)
        return [statistic for statistic in found if statistic is not None]

    def kept_folds(self, module: str, base_name: str) -> list[tuple[str, list[Statistic]]]:
        """Return by their prefixes what is kept of each fold of a tensor."""
        held = self._statistics.get(module, {}).items()
        return [
            (
                prefix,
                [
                    each
                    for (base, key), each in held
                    if base == base_name and fold_of(key) == prefix
                ],
            )
            for prefix in FOLDS
        ]

    def halves(self) -> dict[Place, Halves]:
        """Return what was seen of each half of the data, for the tensors of which it is known."""
        found = ((place, halves_of(each)) for place, each in self.with_folds().items())
        return {place: halves for place, halves in found if halves is not None}

    def with_folds(self) -> dict[Place, dict[str, Statistic]]:
        """Return the statistics of all data, and what is kept of folds, as a file has them."""
        found: dict[Place, dict[str, Statistic]] = {}
        for module, held in self._statistics.items():
            for (base_name, key), statistic in held.items():
                found.setdefault((module, base_name), {})[key] = statistic
        return found

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write a file, whole or not at all, and return its path.

        :param overwrite: whether a file of measurements that is there may be replaced
        """
        target = check_measurements_file(path, overwrite)
        with output_file(target) as place:
            self.write_to(place, overwrite=overwrite)
        return target

    def write_to(self, place: OutputFile, path: Path | None = None, *, overwrite: bool) -> None:
        """Write a file to a place that this process owns; see :meth:`OutputFile.write`."""
        place.write(encoded(self._known_info(), self.with_folds()), path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file; what is damaged, or of another kind or version, is refused.

        All of it is checked. Hessians and counts stay in the file, which stays open, and are read
        each time they are needed.
        """
        info, tensors, digest = decoded(Path(path))
        made = cls.of_tensors(info, tensors)
        made._digest = digest
        return made

    def digest(self) -> str:
        """Return by what all of it is known: the digest of the file that it is or would be in."""
        return self._digest or digest_of_file(self._known_info(), self.with_folds())

    def merge(self, other: Measurements) -> Self:
        """Take in what others have seen, as if all had been seen at once; or refuse, unchanged.

        They must be of the same model, of the same statistics, and of other samples. Folds of the
        data are known afterwards if both know as many.
        """
        info = self._known_info().merged(other._known_info())
        ours, theirs = self.with_folds(), other.with_folds()
        if self.num_folds != other.num_folds:
            ours, theirs = whole_of(ours), whole_of(theirs)
        both = type(self).of_tensors(info, merged(ours, theirs))
        self.info, self._digest = info, None
        self._statistics, self._needed, self._earlier = both._statistics, both._needed, {}
        return self

    def _known_info(self) -> MeasurementsInfo:
        if self.info is None:
            raise MergeError(
                "say neither of which model nor of which data they are",
                subject="These measurements",
                hint="Those of calipers.measure do, and can be saved and merged.",
            )
        return self.info

    def sufficiency(self, tolerance: float = TOLERANCE) -> Sufficiency:
        """Tell by how much what solvers read would still move with more data.

        :param tolerance: which movement, relative to the value itself, is small enough
        """
        tolerance = check_tolerance(tolerance)
        if not self.has_halves:
            raise no_halves()
        found = (
            (tuple(map(name_of, readers)), statistics, halves)
            for readers, statistics in readers_of(self.with_folds())
            if (halves := halves_of(statistics)) is not None
        )
        samples = 0 if self.info is None else len(self.info.samples)
        return sufficiency_of(found, samples, tolerance)

    # For people

    def summary(self) -> dict[str, Any]:
        """Return what there is, as plain data; sizes are bytes in a file."""
        rows, sizes = list[dict[str, Any]](), dict[str, int]()
        for readers, statistics in readers_of(self.with_folds()):
            size = size_of(statistics)
            for key, number in size.items():
                kind = "folds" if fold_of(key) else key
                sizes[kind] = sizes.get(kind, 0) + number
            whole = {key: each for key, each in statistics.items() if not fold_of(key)}
            known = (each.fields() for each in whole.values())
            extrema = next((fields for fields in known if "min_vals" in fields), {})
            magnitudes = magnitudes_of(whole)
            rows.append(
                {
                    "tensor": name_of(readers[0]),
                    "readers": list(map(name_of, readers)),
                    "tokens": min((each.num_tokens for each in whole.values()), default=0),
                    "min": float(extrema["min_vals"].min()) if extrema else None,
                    "max": float(extrema["max_vals"].max()) if extrema else None,
                    "rms": magnitudes and magnitudes.rms,
                    "peak": magnitudes and magnitudes.peak,
                    "histogram": magnitudes and magnitudes.as_dict(),
                    "statistics": list(whole),
                    "size": sum(size.values()),
                }
            )
        total = sum(sizes.values())
        for row in rows:
            row["share"] = row["size"] / total if total else 0.0
        # The input of a module goes by the name of the module.
        peaks = {row["tensor"].removesuffix(".input"): row["peak"] for row in rows if row["peak"]}
        info, about = self.info, dict[str, Any]()
        if info is not None:
            about = {
                "model": {"class": info.model, "fingerprint": info.fingerprint},
                "samples": len(info.samples),
                "tokens": info.tokens,
                "calipers": info.calipers,
                "complete": info.is_complete,
            }
        of_tensors = {"tensors": rows, "peaks": layer_grid(peaks).as_dict()}
        return {**about, "size": total, "statistics": sizes, **of_tensors}

    def __repr__(self) -> str:
        parts = [] if self.info is None else [self.info.model]
        parts.append(counted(len(readers_of(self.tensors())), "tensor"))
        if self.info is not None:
            samples = counted(len(self.info.samples), "sample")
            parts += [samples, f"{self.info.tokens:,} tokens"]
            parts += [] if self.info.is_complete else ["not finished"]
        return f"Measurements({', '.join(parts)})"


def check_measurements_file(
    path: str | os.PathLike[str],
    overwrite: bool = False,
    inputs: Mapping[str, object] | None = None,
) -> Path:
    """Return the absolute path of an output file, or say why it cannot be written.

    :param overwrite: whether a file of measurements that is there may be replaced
    :param inputs: what the file is made from, by what messages call it
    """
    target = check_output_file(path, overwrite, inputs)
    if target.exists() and not is_measurements(target):
        raise CheckpointExistsError(
            "is not replaced: it is no file of measurements",
            subject=f"The output file '{target}'",
            hint="Choose another one, or remove it yourself.",
        )
    return target
