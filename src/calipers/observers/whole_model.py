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
            modules = [getattr(module, sibling, None) for sibling in siblings]
            observers = [getattr(each, "weight_observer", None) for each in modules]
            sharing = [
                observer
                for observer in observers
                if isinstance(observer, Observer) and has_global_scale(observer.args)
            ]
            if len(sharing) < len(siblings):
                continue
            for sibling, observer in zip(siblings, sharing, strict=True):
                observer._fused_observers = set()  # links to observers that were replaced
                observer.module_name = observer.module_name or f"{name}.{sibling}".lstrip(".")
            Observer.fuse(sharing)


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
