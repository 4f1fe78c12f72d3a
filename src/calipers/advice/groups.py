"""Modules that must have the same scheme, since inference engines run them as one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from calipers.observers import FUSED_LAYER_NAMES

_EXPERT = re.compile(r"\.experts\.\d+\.")


def alike_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Put q, k and v together, gate and up, and all experts of a layer; others stand alone.

    >>> alike_groups(["0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"])
    [('0.q_proj', '0.k_proj', '0.v_proj'), ('0.o_proj',)]
    >>> alike_groups(["0.experts.0.up_proj", "0.experts.1.down_proj"])
    [('0.experts.0.up_proj', '0.experts.1.down_proj')]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_key(name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _key(name: str) -> str:
    expert = _EXPERT.search(name)
    if expert is not None:
        return name[: expert.start()] + ".experts"
    parent, _, last = name.rpartition(".")
    fused = next((names for names in FUSED_LAYER_NAMES if last in names), None)
    return name if fused is None else f"{parent}.{fused[0]}+"


def patterns_for(names: Iterable[str]) -> list[str]:
    """Return targets of a recipe that stand for these modules alone.

    >>> patterns_for(["model.layers.0.o_proj", "model.layers.3.o_proj", "lm_head"])
    ['re:^model\\\\.layers\\\\.(0|3)\\\\.o_proj$', 'lm_head']
    """
    numbers: dict[str, dict[str, None]] = {}
    for name in names:
        found = re.search(r"\.(\d+)\.", name)
        if found is None:
            numbers.setdefault(name, {})
            continue
        before, after = re.escape(name[: found.start()]), re.escape(name[found.end() :])
        after = re.sub(r"(^|\.)experts\\\.\d+\\\.", r"\1experts\\.\\d+\\.", after)
        template = f"re:^{before}\\.({{}})\\.{after}$"
        numbers.setdefault(template, {})[found[1]] = None
    return [
        each.replace("{}", "|".join(found)) if found else each for each, found in numbers.items()
    ]
