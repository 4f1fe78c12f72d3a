"""Schemes as arguments of ``QuantizationModifier``, the same for both libraries.

The hidden size of stories15M is 288: groups are 32 wide, and blocks 32 × 32. Observers of static
activations are named, since the libraries do not agree on the one that is used without a name.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

GROUP = 32
STATIC = {"dynamic": False, "observer": "static_minmax"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, **STATIC}
INT8 = {**FP8, "type": "int"}

Recipe = dict[str, Any]
"""What a modifier is given."""


def quantized(
    name: str,
    target: str = "Linear",
    weights: dict[str, Any] | None = None,
    inputs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a preset as a group of a recipe, changed a little."""
    found = preset_name_to_scheme(name, [target])
    group: dict[str, Any] = {"targets": [target], "weights": changed(found.weights, weights)}
    if inputs or found.input_activations:
        group["input_activations"] = changed(found.input_activations, inputs)
    return group


def changed(args: QuantizationArgs | None, changes: dict[str, Any] | None) -> dict[str, Any]:
    """Write arguments as plain data, some of them changed."""
    plain = args.model_dump(exclude_unset=True) if args else {}
    return {**plain, **(changes or {})}


def recipe(*groups: dict[str, Any], **more: Any) -> Recipe:
    """Put groups together."""
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"ignore": ["lm_head"], **({"config_groups": named} if named else {}), **more}


def grouped(bits: int, **more: Any) -> dict[str, Any]:
    """Return weights of so many bits in groups; activations stay as they are."""
    return quantized(f"W{bits}A16", weights={"strategy": "group", "group_size": GROUP, **more})
