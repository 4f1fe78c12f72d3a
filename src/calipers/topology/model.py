"""The topology of a model: its decoder layers, the norm each module reads, its tied tensors.

Norms are told by the names that families of models share.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import Self

from calipers.errors import ConfigurationError, Option
from calipers.topology.names import HEADS, expert_of, fused_projections, grouped

# What the first Linears of either block of a layer are called, and the blocks themselves. Routers,
# and experts that are stacked in one module, read the same norm.
_ATTENTION = ("self_attn", "self_attention", "attention")
_READ_BY_ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"),
    *("q_a_proj", "kv_a_proj_with_mqa"),
)
_MLP = ("mlp", "block_sparse_moe", "feed_forward")
_READ_BY_MLP = (
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "dense_h_to_4h"),
    *("gate", "router", "shared_expert_gate", "experts"),
)

# Low-rank projections of attention have norms of their own between the two matrices.
_LATENT = {"q_a_layernorm": "q_b_proj", "kv_a_layernorm": "kv_b_proj"}

# The norms of a layer by the block that reads them; none where they normalize what a block returns.
# A layer whose norms are called in another way is not guessed at.
_LAYOUTS: tuple[dict[str, str], ...] = (
    {"input_layernorm": "attention", "post_attention_layernorm": "mlp"},
    {"input_layernorm": "attention mlp"},  # one norm for two blocks side by side
    {"ln_attn": "attention", "ln_mlp": "mlp"},
    {"self_attn_layer_norm": "attention", "final_layer_norm": "mlp"},  # OPT
    {  # Gemma 2 and 3
        "input_layernorm": "attention",
        "post_attention_layernorm": "",
        "pre_feedforward_layernorm": "mlp",
        "post_feedforward_layernorm": "",
    },
    {"post_attention_layernorm": "", "post_feedforward_layernorm": ""},  # OLMo 2
    {  # GLM 4
        "input_layernorm": "attention",
        "post_self_attn_layernorm": "",
        "post_attention_layernorm": "mlp",
        "post_mlp_layernorm": "",
    },
)
_FINAL = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


@dataclass(frozen=True)
class Topology:
    """What a model is made of, by the names of its modules.

    :param layers: the decoder layers, in order
    :param norms: module that reads the output of a norm → that norm
    """

    layers: tuple[str, ...] = ()
    norms: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: torch.nn.Module) -> Self:
        """Resolve the topology of a model; one without a stack of layers has no layers."""
        modules = dict(model.named_modules())
        try:
            layers = tuple(decoder_layers(model))
        except ConfigurationError:
            layers = ()
        norms = {}
        # An OPT of one size normalizes what blocks return.
        is_behind = any(not getattr(m, "do_layer_norm_before", True) for m in modules.values())
        known = {} if is_behind else _norms_of_readers(modules, layers)
        for reader, norm in known.items():
            scale: Any = getattr(modules[norm], "weight", None)
            matrix: Any = getattr(modules[reader], "weight", None)
            # A norm has weights, as many as a matrix that reads it has columns.
            has_weights = scale is not None and scale.ndim == 1
            if has_weights and (matrix is None or matrix.shape[-1] == scale.shape[0]):
                norms[reader] = norm
        return cls(layers, norms)

    def layer_of(self, name: str) -> str | None:
        """Return the decoder layer that a module is in; None outside of layers."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if prefix in self.layers), None)

    def shared_inputs(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Group modules that read the same tensor; each expert has tokens of its own."""

        def key(name: str) -> object:
            norm = None if expert_of(name) else self.norms.get(name)
            return fused_projections(name) if norm is None else norm

        return grouped(names, key)


def decoder_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Find the stack of layers that a model consists of: name → layer, in order.

    Where a model has several, as those that see images do, it is the one of its decoder.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    everywhere = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    ]
    decoder = getattr(model, "get_decoder", lambda: None)()
    within = set(decoder.modules()) if isinstance(decoder, torch.nn.Module) else set()
    stacks = [stack for stack in everywhere if stack[1] in within] or everywhere
    named = [(n, m) for n, m in stacks if all(type(layer).__name__ in classes for layer in m)]
    if not (named or stacks):
        raise ConfigurationError(
            "has no ModuleList of layers, so it cannot be calibrated layer by layer",
            subject=type(model).__name__,
            hint="Pass " + Option("pipeline", "basic"),
        )
    name, stack = max(named or stacks, key=lambda stack: len(stack[1]))
    return {f"{name}.{index}": layer for index, layer in enumerate(stack)}


def _norms_of_readers(names: Collection[str], layers: Sequence[str]) -> dict[str, str]:
    """Map each module that reads the output of a norm to that norm."""
    if not layers:
        return {}
    inside: dict[str, list[str]] = {layer: [] for layer in layers}
    depth = layers[0].count(".") + 1
    for name in names:
        parts = name.split(".")
        layer = ".".join(parts[:depth])
        if layer in inside and len(parts) > depth:
            inside[layer].append(".".join(parts[depth:]))
    norms = {
        f"{layer}.{reader}": f"{layer}.{norm}"
        for layer, local in inside.items()
        for reader, norm in _norms_in_layer(local).items()
    }
    # The head reads the norm behind the last layer, where both are known.
    parent = layers[0].rpartition(".")[0].rpartition(".")[0]
    finals = [path for name in _FINAL if (path := f"{parent}.{name}".lstrip(".")) in names]
    heads = [name for name in HEADS if name in names]
    is_plain = not any(name.rpartition(".")[2] == "project_out" for name in names)
    if len(finals) == len(heads) == 1 and is_plain:
        norms[heads[0]] = finals[0]
    return norms


def _norms_in_layer(names: Sequence[str]) -> dict[str, str]:
    """Map readers to norms by their names within a layer."""
    own = {n for n in names if "." not in n and ("norm" in n or n.startswith("ln_"))}
    layout: Mapping[str, str] = next((known for known in _LAYOUTS if known.keys() == own), {})
    norm_of_block = {block: norm for norm, blocks in layout.items() for block in blocks.split()}
    norms: dict[str, str] = {}
    for name in names:
        parent, _, own_name = name.rpartition(".")
        block = _block_that_begins_with(name)
        if block in norm_of_block and f"{name}.0" not in names:  # not experts that are modules
            norms[name] = norm_of_block[block]
        elif parent in _ATTENTION:
            for norm, reader in _LATENT.items():
                if own_name == reader and f"{parent}.{norm}" in names:
                    norms[name] = f"{parent}.{norm}"
    return norms


def _block_that_begins_with(name: str) -> str:
    """Return which block of a layer hands its input on to a module as it is, if one does."""
    parent, _, own = name.rpartition(".")
    if parent in _ATTENTION:
        return "attention" if own in _READ_BY_ATTENTION else ""
    first = name.partition(".")[0]
    expert = expert_of(name)
    depth = parent if expert is None else expert.experts.rpartition(".")[0]
    is_mlp = first in _MLP or name == "fc1"
    shallow = depth in ("", first, f"{first}.shared_expert", f"{first}.shared_experts")
    return "mlp" if is_mlp and shallow and own in _READ_BY_MLP else ""


def norm_vectors(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Go through the vectors of the norms of a model: names of the module and of the parameter.

    Norms are told by their classes; one that modules share is named once.
    """
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and not any(module.children()):
            for local, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 1 and parameter.is_floating_point():
                    yield name, local


def declared_ties(model: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Return the copies among tensors that the classes of a model declare, with their sources."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for copy, source in (getattr(module, "_tied_weights_keys", None) or {}).items():
            pattern = re.compile(re.escape(start) + copy)
            for name in filter(pattern.fullmatch, names):
                yield name, start + source


def says_tied(model: torch.nn.Module) -> bool:
    """Whether the config says that embedding and head are one."""
    config: Any = model.config
    return bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
