"""How much each module has seen."""

from __future__ import annotations

from collections import Counter

import torch

from calipers.observers.base import Observer


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
