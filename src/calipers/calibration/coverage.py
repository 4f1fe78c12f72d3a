"""How many tokens each module has seen, and a warning while the data still runs."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import Any

import torch

from calipers.calibration.context import Calibration
from calipers.errors import CalipersWarning, Option, UnseenModulesError, counted, shortened
from calipers.measurements import Measurements
from calipers.notebook import NotebookView
from calipers.observers.spec import COUNTS, RANGE
from calipers.options import OnUnseen
from calipers.planning.specs import IMPORTANCE, ModuleSpec
from calipers.runtime.ranks import Ranks
from calipers.statistics.ranges import LastRange
from calipers.topology.names import expert_of

SCARCE = 0.1
"""An expert that sees less than this part of its even share is reported."""


@dataclass
class Coverage(NotebookView):
    """Tokens seen by each module that needs data.

    :param tokens: module → tokens
    :param policy: what was to be done about modules that saw none
    :param applied: modules the policy was applied to → what was done
    """

    policy: OnUnseen = "error"
    tokens: dict[str, int] = field(default_factory=dict)
    applied: dict[str, str] = field(default_factory=dict)

    @property
    def unseen(self) -> list[str]:
        """Modules that saw no token."""
        return [name for name, count in self.tokens.items() if not count]

    @property
    def scarce(self) -> dict[str, float]:
        """Experts that saw some, but less than a tenth of an even share → their part of it."""
        shares: dict[str, float] = {}
        for names in self._families().values():
            even = sum(self.tokens[name] for name in names) / len(names)
            shares |= {name: self.tokens[name] / even for name in names if self.tokens[name]}
        return {name: share for name, share in shares.items() if share < SCARCE}

    def siblings(self, name: str) -> list[str]:
        """Return the experts beside one that have seen something."""
        expert = expert_of(name)
        names = self._families()[expert.family] if expert else []
        return [other for other in names if other != name and self.tokens[other]]

    def _families(self) -> dict[tuple[str, str], list[str]]:
        families: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in self.tokens:
            if expert := expert_of(name):
                families[expert.family].append(name)
        return families

    def __repr__(self) -> str:
        if not self.tokens:
            return "Coverage(no module needed data)"
        least, most = min(self.tokens.values()), max(self.tokens.values())
        amount = f"{least:,} tokens" if least == most else f"{least:,} to {most:,} tokens"
        numbers = {"unseen": len(self.unseen), "scarce": len(self.scarce)}
        parts = [f"{number} {what}" for what, number in numbers.items() if number]
        return f"Coverage({', '.join([counted(len(self.tokens), 'module'), amount, *parts])})"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "on_unseen": self.policy,
            "tokens": self.tokens,
            "unseen": self.unseen,
            "scarce_experts": self.scarce,
            "applied": self.applied,
        }

    def sentences(self) -> list[str]:
        """Say what a user must know: who saw nothing, and who saw little."""
        sentences = []
        if self.unseen:
            done = {self.applied.get(name, "nothing done") for name in self.unseen}
            sentences.append(
                f"{counted(len(self.unseen), 'module')} saw no tokens ({'; '.join(sorted(done))}): "
                f"{shortened(self.unseen)}."
            )
        if self.scarce:
            sentences.append(
                f"{counted(len(self.scarce), 'module')} of experts saw less than {SCARCE:.0%} of "
                f"an even share: {shortened(self.scarce)}. Give more data."
            )
        return sentences


_ALL_EXPERTS = "show all tokens to all experts (" + Option("calibrate_all_experts", True) + ")"
_WEIGHTS_ONLY = Option("on_unseen", "weights_only")
_HINTS: dict[str, str] = {
    "error": (
        "Give more or other data, "
        + _ALL_EXPERTS
        + ", ignore these modules, or choose what to do without data: "
        + _WEIGHTS_ONLY
        + " (their activations stay as they are) or, for experts, "
        + Option("on_unseen", "peers")
        + " (the largest range among their siblings)"
    ),
    "weights_only": "They have no weights to fall back on. Give more or other data",
    "peers": (
        "They have no siblings that saw any. Give more or other data, "
        + _ALL_EXPERTS
        + ", ignore these modules, or pass "
        + _WEIGHTS_ONLY
    ),
}
"""What to do next, by the policy that has not helped."""


def settle_unseen(
    modules: list[ModuleSpec], coverage: Coverage, measurements: Measurements, ranks: Ranks
) -> dict[str, ModuleSpec]:
    """Do what the policy says about modules that saw nothing, and return those it changes."""
    unseen = [module for module in modules if coverage.tokens.get(module.name) == 0]
    helpless = []
    for module in unseen:
        has_weight = coverage.policy == "weights_only" and module.tensor("weight") is not None
        has_peers = coverage.policy == "peers" and bool(coverage.siblings(module.name))
        if not has_weight and not has_peers:
            helpless.append(module.name)
    if helpless:
        raise no_tokens(helpless, coverage.policy)
    changed = {}
    for module in unseen:
        if coverage.policy == "weights_only":
            changed[module.name] = module.weights_only()
            coverage.applied[module.name] = "weights only"
        else:
            _learn_from_peers(module, coverage.siblings(module.name), measurements, ranks)
            coverage.applied[module.name] = "largest range of its peers"
    return changed


def no_tokens(names: Sequence[str], policy: OnUnseen) -> UnseenModulesError:
    """Refuse modules that saw nothing, and that a policy does not help."""
    return UnseenModulesError(
        f"{counted(len(names), 'module')} saw no tokens: {shortened(names)}",
        names=names,
        hint=_HINTS[policy],
    )


def _learn_from_peers(
    module: ModuleSpec, peers: list[str], measurements: Measurements, ranks: Ranks
) -> None:
    for tensor in module.tensors:
        if measurements.get(module.name, tensor.base_name, RANGE) is not None:
            assert tensor.observer is not None
            mine = []
            for peer in peers:
                seen = {
                    key: measurements.get(peer, tensor.base_name, key) for key in (RANGE, COUNTS)
                }
                extrema = tensor.observer.range_of_stream(seen, peer)
                if extrema is not None:
                    ranged = seen[RANGE]
                    like = None if ranged is None else ranged.field("observed_like")
                    mine.append((*extrema, extrema[0] if like is None else like))
            # Some processes remember only what they saw themselves.
            everyone = chain.from_iterable(ranks.share(mine))
            lows, highs, likes = zip(*everyone, strict=True)
            united = LastRange()
            united.absorb(
                min_vals=reduce(torch.minimum, lows),
                max_vals=reduce(torch.maximum, highs),
                observed_like=likes[0],
            )
            measurements.replace(module.name, tensor.base_name, RANGE, united)
    inputs = measurements.get(module.name, "input", IMPORTANCE)
    if inputs is not None:
        borrowed = copy.deepcopy(inputs)  # others may publish what was really seen
        borrowed.reset()
        for peer in peers:
            theirs = measurements.get(peer, "input", IMPORTANCE)
            assert theirs is not None
            borrowed.merge(theirs)
        measurements.replace(module.name, "input", IMPORTANCE, borrowed)


PART = 0.1
"""How much of the data has run when somebody looks."""


class EarlyLook:
    """Warns, once and after a tenth of the batches, of modules that no token has reached.

    Of fewer than ten batches each is more than a tenth: the end is near enough.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._has_warned = calibration, False

    def after(self, index: int, total: int, names: Iterable[str]) -> None:
        """Look at modules when a batch, one of ``total``, has run."""
        if self._has_warned or PART * total < 1 or index + 1 != math.ceil(PART * total):
            return
        wanted = [name for name in names if self._calibration.measurements.needed(name)]
        unseen = [name for name in wanted if not self._calibration.tokens(name)]
        if unseen:
            self._has_warned = True
            warning = CalipersWarning(
                f"{len(unseen)} of {counted(len(wanted), 'module')} have seen no token in the "
                f"first {index + 1} of {total} batches: {shortened(unseen)}. If that stays so, "
                "the run fails at its end",
                hint=Option("calibrate_all_experts", True)
                + " shows all tokens to all experts; "
                + Option("on_unseen", "weights_only")
                + " or "
                + Option("on_unseen", "peers")
                + " does without.",
            )
            warnings.warn(warning, stacklevel=2)
