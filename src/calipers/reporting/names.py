"""Where a module stands in a model, read from its name: which layer, and which kind of module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from calipers.topology.names import split_layer, without_numbers


class Position(NamedTuple):
    """The number of the decoder layer, and what the module is called in each layer.

    >>> Position.of("model.layers.12.mlp.experts.3.up_proj")
    Position(layer=12, kind='mlp.experts.*.up_proj')
    >>> Position.of("lm_head")
    Position(layer=None, kind='lm_head')
    """

    layer: int | None
    kind: str

    @classmethod
    def of(cls, name: str) -> Position:
        """Read a name."""
        layer, rest = split_layer(name)
        if not layer:
            return cls(None, name)
        return cls(int(layer.rpartition(".")[2]), without_numbers(rest))


_ORDER = ("q", "k", "v", "qkv", "o", "out", "gate", "up", "gate_up", "down", "fc1", "fc2")


def short_kinds(kinds: Iterable[str]) -> dict[str, str]:
    """Return a short word for each kind, in the order in which data meets them.

    >>> short_kinds(["mlp.down_proj", "self_attn.o_proj", "self_attn.q_proj"])
    {'self_attn.q_proj': 'q', 'self_attn.o_proj': 'o', 'mlp.down_proj': 'down'}
    >>> list(short_kinds(["self_attn.q_proj", "cross.q_proj"]).values())
    ['self_attn.q_proj', 'cross.q_proj']
    """
    known = dict.fromkeys(kinds)
    words = {kind: kind.rpartition(".")[2].removesuffix("_proj") for kind in known}
    counts = Counter(words.values())
    short = {kind: word if counts[word] == 1 else kind for kind, word in words.items()}
    rank = {word: place for place, word in enumerate(_ORDER)}
    order = sorted(known, key=lambda kind: rank.get(words[kind], len(rank)))
    return {kind: short[kind] for kind in order}
