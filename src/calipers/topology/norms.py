"""Which norm is in front of each Linear, told by the names that families of models share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from calipers.topology.names import expert_of

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
_HEADS = ("lm_head", "embed_out")


def norms_of_readers(names: Collection[str], layers: Sequence[str]) -> dict[str, str]:
    """Map each module that reads the output of a norm to that norm.

    >>> norms_of_readers(["layers.0.input_layernorm", "layers.0.post_attention_layernorm",
    ...                   "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"], ["layers.0"])
    {'layers.0.self_attn.q_proj': 'layers.0.input_layernorm'}
    """
    inside: dict[str, list[str]] = {layer: [] for layer in layers}
    depth = layers[0].count(".") + 1 if layers else 0
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
    return norms | _norm_of_head(names, layers)


def _norms_in_layer(names: Sequence[str]) -> dict[str, str]:
    """Map readers to norms by their names within a layer."""
    own = {n for n in names if "." not in n and ("norm" in n or n.startswith("ln_"))}
    layout: Mapping[str, str] = next((each for each in _LAYOUTS if each.keys() == own), {})
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
    """Return which block of a layer hands its input on to a module as it is.

    >>> _block_that_begins_with("mlp.experts.3.up_proj"), _block_that_begins_with("mlp.down_proj")
    ('mlp', '')
    """
    parent, _, own = name.rpartition(".")
    if parent in _ATTENTION:
        return "attention" if own in _READ_BY_ATTENTION else ""
    first = name.partition(".")[0]
    expert = expert_of(name)
    depth = parent if expert is None else expert.experts.rpartition(".")[0]
    is_mlp = first in _MLP or name == "fc1"
    shallow = depth in ("", first, f"{first}.shared_expert", f"{first}.shared_experts")
    return "mlp" if is_mlp and shallow and own in _READ_BY_MLP else ""


def _norm_of_head(names: Collection[str], layers: Sequence[str]) -> dict[str, str]:
    """Map the head to the norm behind the last layer, where both are known."""
    if not layers:
        return {}
    parent = layers[0].rpartition(".")[0].rpartition(".")[0]
    norms = [each for name in _FINAL if (each := f"{parent}.{name}".lstrip(".")) in names]
    heads = [name for name in _HEADS if name in names]
    is_plain = not any(name.rpartition(".")[2] == "project_out" for name in names)
    return {heads[0]: norms[0]} if len(norms) == len(heads) == 1 and is_plain else {}
