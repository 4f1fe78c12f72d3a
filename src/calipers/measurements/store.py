"""The statistics of a model, by module and tensor; independent of formats and solvers."""

from __future__ import annotations

from collections.abc import Iterable

from calipers.statistics.base import Statistic


class Measurements:
    """What was seen of the tensors of a model.

    A tensor may have several statistics, each under the key by which whoever needs it asks. Two
    keys of one tensor may stand for the same statistic.

    >>> from calipers.statistics.moments import SquareSums
    >>> seen = Measurements()
    >>> sums = seen.add("layers.0.up_proj", "input", "importance", SquareSums())
    >>> seen.get("layers.0.up_proj", "input", "importance") is sums
    True
    """

    def __init__(self) -> None:
        self._statistics: dict[str, dict[tuple[str, str], Statistic]] = {}
        self._needed: dict[str, list[Statistic]] = {}
        self._earlier: dict[str, list[Statistic]] = {}

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
        for (tensor, _), known in held.items():
            if tensor == base_name and known.configuration() == statistic.configuration():
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

    def forget(self, modules: Iterable[str]) -> None:
        """Let go of what was seen of some modules."""
        for name in modules:
            self._statistics.pop(name, None)
            self._needed.pop(name, None)
            self._earlier.pop(name, None)
