"""Functions for the observers that are attached to the modules of a model."""

from __future__ import annotations

from collections import Counter

import torch

from calipers.numerics.layout import has_global_scale
from calipers.observers.base import Observer
from calipers.topology.names import FUSED_LAYER_NAMES


def fuse_weight_observers(model: torch.nn.Module) -> None:
    """Link the weight observers of such siblings, where all of them are TENSOR_GROUP."""
    for name, module in model.named_modules():
        for siblings in FUSED_LAYER_NAMES:
            observers = [_weight_observer(module, sibling) for sibling in siblings]
            found = [observer for observer in observers if observer is not None]
            if len(found) < len(siblings):
                continue
            for sibling, observer in zip(siblings, found, strict=True):
                observer._fused_observers = set()  # links to observers that were replaced
                observer.module_name = observer.module_name or f"{name}.{sibling}".lstrip(".")
            Observer.fuse(found)


def _weight_observer(module: torch.nn.Module, name: str) -> Observer | None:
    observer = getattr(getattr(module, name, None), "weight_observer", None)
    if not isinstance(observer, Observer):
        return None
    return observer if has_global_scale(observer.args) else None


def get_observer_token_count(model: torch.nn.Module) -> Counter[str]:
    """Count for each module the tokens that its activation observers have seen.

    Of several observers on one module, the one that saw most counts.
    """
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        owner, _, attribute = name.rpartition(".")
        if isinstance(module, Observer) and attribute != "weight_observer":
            counts[owner] = max(counts[owner], module.num_observed_tokens)
    return counts
