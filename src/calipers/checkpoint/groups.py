"""Which group of a quantization config a module belongs to."""

from __future__ import annotations

from collections.abc import Iterable

from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match, match_targets
from torch import nn


def group_of(module: nn.Module, names: Iterable[str], config: QuantizationConfig) -> str | None:
    """Return the key of the group that compressed-tensors takes for a module, if any.

    Where several groups match, a target that is the name of the module wins over a pattern, and a
    pattern over a class; of several patterns the first in alphabetical order wins.

    :param names: the name on disk and the one in memory, where they differ; the first that matches
        counts

    >>> weights = {"num_bits": 4}
    >>> all_of_them = {"targets": ["Linear"], "weights": weights}
    >>> some = {"targets": ["re:.*up_proj"], "weights": {**weights, "num_bits": 8}}
    >>> config = QuantizationConfig.model_validate({"config_groups": {"a": all_of_them, "b": some}})
    >>> [group_of(nn.Linear(1, 1), [name], config) for name in ("mlp.up_proj", "mlp.down_proj")]
    ['b', 'a']
    """
    names = list(dict.fromkeys(names))
    if any(is_match(name, module, config.ignore or []) for name in names):
        return None
    owner = {target: key for key, group in config.config_groups.items() for target in group.targets}
    matched = (match_targets(name, module, owner) for name in names)
    return next((owner[targets[0]] for targets in matched if targets), None)
