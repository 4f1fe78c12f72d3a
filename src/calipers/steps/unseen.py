"""What becomes of modules that no token has reached."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from calipers.calibration.coverage import Coverage
from calipers.errors import Option, UnseenModulesError, Words, counted, shortened
from calipers.measurements import Measurements
from calipers.observers.spec import COUNTS, RANGE, range_of_stream
from calipers.options import OnUnseen
from calipers.planning.specs import IMPORTANCE, ModuleSpec, TensorSpec
from calipers.runtime.ranks import Ranks
from calipers.statistics.ranges import LastRange

_ALL_EXPERTS = "show all tokens to all experts (" + Option("calibrate_all_experts", True) + ")"
_WEIGHTS_ONLY = Option("on_unseen", "weights_only")
_HINTS: dict[str, Words] = {
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

SeenRange = tuple[Tensor, Tensor, Tensor]
"""The least, the largest, and a tensor like those that were seen."""


def settle_unseen(
    modules: list[ModuleSpec], coverage: Coverage, measurements: Measurements, ranks: Ranks
) -> dict[str, ModuleSpec]:
    """Do what the policy says about modules that saw nothing, and return those it changes."""
    unseen = [module for module in modules if coverage.tokens.get(module.name) == 0]
    helpless = [module.name for module in unseen if not _can_settle(module, coverage)]
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


def _can_settle(module: ModuleSpec, coverage: Coverage) -> bool:
    if coverage.policy == "weights_only":
        return module.tensor("weight") is not None
    return coverage.policy == "peers" and bool(coverage.siblings(module.name))


def _learn_from_peers(
    module: ModuleSpec, peers: list[str], measurements: Measurements, ranks: Ranks
) -> None:
    for tensor in module.tensors:
        if measurements.get(module.name, tensor.base_name, RANGE) is not None:
            united = _united_range(_ranges(tensor, peers, measurements, ranks))
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


def _ranges(
    tensor: TensorSpec, peers: list[str], measurements: Measurements, ranks: Ranks
) -> list[SeenRange]:
    """Return the ranges of peers in any process: some remember only what they saw in their own."""
    assert tensor.observer is not None
    mine: list[SeenRange] = []
    for peer in peers:
        seen = {key: measurements.get(peer, tensor.base_name, key) for key in (RANGE, COUNTS)}
        found = range_of_stream(tensor.observer, seen, peer)
        if found is not None:
            ranged = seen[RANGE]
            like = None if ranged is None else ranged.field("observed_like")
            mine.append((*found, found[0] if like is None else like))
    return [each for theirs in ranks.share(mine) for each in theirs]


def _united_range(ranges: list[SeenRange]) -> LastRange:
    """Return the largest of some ranges."""
    lows, highs, likes = zip(*ranges, strict=True)
    united = LastRange()
    united.absorb(
        min_vals=reduce(torch.minimum, lows),
        max_vals=reduce(torch.maximum, highs),
        observed_like=likes[0],
    )
    return united
