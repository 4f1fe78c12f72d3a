"""What the names of modules tell: layers, experts, projections that run as one matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

FUSED_LAYER_NAMES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Siblings that inference engines run as one matrix."""

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The Linears of an expert in the order in which they run; some models have no gate."""

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "kv_b_proj", "query_key_value")
"""The Linears of an attention module that compute its keys: a module has one if it is attention."""

HEADS = ("lm_head", "embed_out")
"""The Linears behind the last layer, whose outputs are logits."""

EMBEDDINGS = ("embed_tokens", "wte")
"""The embeddings that a head may be tied to."""

EXPERTS_PATTERN = r"re:.*\.experts\..*"
"""A target of compressed-tensors that matches everything in experts."""

_EXPERT = re.compile(r"^(?P<experts>(?:.*\.)?experts)\.(?P<number>\d+)(?:\.(?P<rest>.+))?$")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class ExpertName(NamedTuple):
    """A name inside an expert.

    :param experts: the module that holds all experts of a layer
    :param rest: the name within the expert; empty for the expert itself
    """

    experts: str
    number: int
    rest: str

    @property
    def family(self) -> tuple[str, str]:
        """What the same modules of all experts of a layer have in common."""
        return self.experts, self.rest


def expert_of(name: str) -> ExpertName | None:
    """Parse a name inside an expert; None for other names.

    >>> expert_of("model.layers.0.mlp.experts.3.up_proj")
    ExpertName(experts='model.layers.0.mlp.experts', number=3, rest='up_proj')
    """
    match = _EXPERT.match(name)
    if match is None:
        return None
    return ExpertName(match["experts"], int(match["number"]), match["rest"] or "")


def projection_of(attention: str, state: str) -> str:
    """Return the Linear that computes the queries, keys or values of an attention module.

    >>> projection_of("layers.0.self_attn", "k")
    'layers.0.self_attn.k_proj'
    """
    return f"{attention}.{state}_proj"


def is_embedding(name: str) -> bool:
    """Whether a matrix of a model that nobody knows is that of an embedding, by its name.

    >>> is_embedding("model.embed_tokens"), is_embedding("lm_head")
    (True, False)
    """
    return "embed" in name


def without_expert_number(name: str) -> str:
    """Return the name that the same modules of all experts have in common.

    >>> without_expert_number("layers.0.mlp.experts.7.down_proj")
    'layers.0.mlp.experts.*.down_proj'
    """
    expert = expert_of(name)
    return name if expert is None else f"{expert.experts}.*.{expert.rest}".removesuffix(".")


def without_numbers(name: str) -> str:
    """Replace all numbers of a name by stars.

    >>> without_numbers("model.layers.12.mlp.experts.3.up_proj")
    'model.layers.*.mlp.experts.*.up_proj'
    """
    return _NUMBER.sub("*", name)


def split_layer(name: str) -> tuple[str, str]:
    """Split a name into that of its layer and the rest; the layer is empty outside of layers.

    >>> split_layer("model.layers.12.mlp.experts.3.up_proj")
    ('model.layers.12', 'mlp.experts.3.up_proj')
    """
    match = _LAYER.search(name)
    return ("", name) if match is None else (name[: match.end(1)], name[match.end() :])


def fused_projections(name: str) -> tuple[str, ...]:
    """Return the names of all projections that engines fuse with one, itself among them.

    >>> fused_projections("layers.0.mlp.up_proj")
    ('layers.0.mlp.gate_proj', 'layers.0.mlp.up_proj')
    """
    parent, dot, own = name.rpartition(".")
    siblings = next((names for names in FUSED_LAYER_NAMES if own in names), (own,))
    return tuple(f"{parent}{dot}{sibling}" for sibling in siblings)


def fused_groups(names: Iterable[str], *, complete: bool = False) -> list[tuple[str, ...]]:
    """Group names of modules that run as one matrix; others stand alone.

    :param complete: whether projections stand alone where some of their siblings are missing

    >>> fused_groups(["0.q_proj", "0.k_proj", "0.o_proj"])
    [('0.q_proj', '0.k_proj'), ('0.o_proj',)]
    >>> fused_groups(["0.q_proj", "0.k_proj"], complete=True)
    [('0.q_proj',), ('0.k_proj',)]
    """
    known = dict.fromkeys(names)
    groups: dict[tuple[str, ...], None] = {}
    for name in known:
        siblings = fused_projections(name)
        group = tuple(sibling for sibling in siblings if sibling in known)
        groups[(name,) if complete and group != siblings else group] = None
    return list(groups)


def groups_side_by_side(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group names of modules that do not see each other's results: as fused, over all experts.

    >>> groups_side_by_side(["0.experts.0.up_proj", "0.experts.1.gate_proj", "0.experts.1.w2"])
    [('0.experts.0.up_proj', '0.experts.1.gate_proj'), ('0.experts.1.w2',)]
    """
    return grouped(names, lambda name: fused_projections(without_expert_number(name)))


def groups_of_one_scheme(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group names of modules for which engines know one scheme: those fused, experts of a layer."""

    def key(name: str) -> Hashable:
        expert = expert_of(name)
        return fused_projections(name) if expert is None else expert.experts

    return grouped(names, key)


def grouped(names: Iterable[str], key: Callable[[str], Hashable]) -> list[tuple[str, ...]]:
    """Group names with equal keys, in the order in which the groups begin."""
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return [tuple(group) for group in groups.values()]


def patterns_for(names: Iterable[str]) -> list[str]:
    """Return targets of a recipe that match these modules alone, and any number of experts."""
    numbers: dict[str, dict[str, None]] = {}
    for name in names:
        layer, rest = split_layer(name)
        if not layer:
            numbers.setdefault(name, {})
            continue
        stack, dot, number = layer.rpartition(".")
        rest = re.sub(r"(^|\.)experts\\\.\d+\\\.", r"\1experts\\.\\d+\\.", re.escape(rest))
        template = f"re:^{re.escape(stack + dot)}({{}})\\.{rest}$"
        numbers.setdefault(template, {})[number] = None
    return [
        template.replace("{}", "|".join(layers)) if layers else template
        for template, layers in numbers.items()
    ]
