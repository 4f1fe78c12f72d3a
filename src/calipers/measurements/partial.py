"""A run that is not finished: a file of what it has seen, from which the next one goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from calipers.errors import ConfigurationError, MeasurementsError, damaged_measurements
from calipers.files.writing import PARTIAL, OutputFile
from calipers.measurements.info import MeasurementsInfo
from calipers.measurements.store import Measurements
from calipers.measurements.tensors import Tensors

_LEAST_REST = 20
"""How many times as long as it took to write a file nothing is written again."""


class PartialFile:
    """The file of a run beside its output, of the same format, which says that it is not complete.

    :param place: the output, which belongs to this process
    :param seconds: how long nothing is written after a file was
    """

    def __init__(self, place: OutputFile, seconds: float) -> None:
        self._place, self._seconds = place, seconds
        self.path = place.path.with_name(place.path.name + PARTIAL)
        self._arguments: Mapping[str, Any] = {}
        self._before: Measurements | None = None
        self._next = time.monotonic() + seconds

    def begin(self, arguments: Mapping[str, Any]) -> int:
        """Return how many batches an earlier run has done; refuse one with other arguments.

        :param arguments: what both must have in common, as plain data
        """
        self._arguments = dict(arguments)
        if not self.path.exists():
            return 0
        try:
            self._before = Measurements.load(self.path)
        except MeasurementsError as error:
            error.add_hint("If you remove it, the run begins anew.")
            raise
        run = {} if self._before.info is None else self._before.info.run
        before = run.get("arguments")
        known = before if isinstance(before, dict) else {}
        for name, value in arguments.items():
            if known.get(name) != value:
                raise ConfigurationError(
                    f"is that of a run with other arguments: {name} was {known.get(name)!r}, and "
                    f"is {value!r} now",
                    subject=f"The unfinished file '{self.path}'",
                    hint="Give the same arguments to go on with that run, or remove the file to "
                    "begin anew.",
                )
        batches = run.get("batches")
        if not isinstance(batches, int) or batches < 0:
            raise damaged_measurements(self.path, f"it says that {batches!r} batches are done")
        return batches

    def earlier(self) -> Tensors | None:
        """Return, once, what the run before this one has seen; None where there was none."""
        before, self._before = self._before, None
        return None if before is None else before.with_folds()

    def save(self, info: MeasurementsInfo, tensors: Callable[[], Tensors], batches: int) -> None:
        """Write what was seen so far, if it is time.

        :param tensors: gives what this run and the one before it have seen
        :param batches: how many are done, with those of the run before
        """
        if time.monotonic() < self._next:
            return
        start = time.monotonic()
        run = {"arguments": self._arguments, "batches": batches}
        seen = Measurements.of_tensors(replace(info, run=run), tensors())
        seen.write_to(self._place, self.path, overwrite=True)
        end = time.monotonic()
        self._next = end + max(self._seconds, _LEAST_REST * (end - start) if self._seconds else 0)

    def finish(self, found: Measurements, *, overwrite: bool) -> None:
        """Write what was measured, and remove what is no longer needed."""
        found.write_to(self._place, overwrite=overwrite)
        self.path.unlink(missing_ok=True)


def remove_superfluous(output: Path) -> None:
    """Remove the file of a run that was killed when its output had just been written."""
    path = output.with_name(output.name + PARTIAL)
    if not (path.exists() and output.exists()):
        return
    with suppress(MeasurementsError):  # whoever reads them says what is wrong
        done, partial = (Measurements.load(each).info for each in (output, path))
        same = done is not None and partial is not None and done.fingerprint == partial.fingerprint
        if same and not Counter(partial.samples) - Counter(done.samples):  # type: ignore[union-attr]
            path.unlink(missing_ok=True)  # several processes may look at once
