"""Small random models, quantized and frozen by hand: what a calibration run leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from models import random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
)

from calipers.observers import Observer

TOKENS = torch.arange(48).view(3, 16) * 7 % 128
KV_FP8 = QuantizationArgs(
    num_bits=8, type="float", strategy="tensor", dynamic=False, observer="static_minmax"
)
SCHEMES = [
    "W4A16",
    "W4A16_ASYM",
    "W2A16",
    "W3A16",
    "W8A16",
    "W8A8",
    "W8A8_STATIC",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8",
]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    return random_model(LlamaConfig(**{**SIZES, **options}), dtype)


def qwen2(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    return random_model(Qwen2Config(**{**SIZES, **options}), dtype)


def mixtral(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    config = MixtralConfig(**{**SIZES, "num_local_experts": 4, **options})
    return random_model(config, dtype)


def qwen2_moe(dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    moe = {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    config = Qwen2MoeConfig(**{**SIZES, **moe, "num_experts_per_tok": 2, **options})
    return random_model(config, dtype)


def scheme(name: str, targets: tuple[str, ...] = ("Linear",)) -> QuantizationScheme:
    """A preset, or one of those that presets do not have."""
    if name == "W8A8_STATIC":
        return QuantizationScheme(
            targets=list(targets),
            weights=QuantizationArgs(num_bits=8, strategy="channel"),
            input_activations=QuantizationArgs(
                num_bits=8, strategy="tensor", observer="static_minmax"
            ),
        )
    return preset_name_to_scheme(name, list(targets))


def freeze(
    model: PreTrainedModel,
    *schemes: QuantizationScheme,
    kv_cache: QuantizationArgs | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
) -> PreTrainedModel:
    """Quantize a model in place, with the ranges of TOKENS."""
    for each in schemes:
        if each.weights is not None:
            each.weights.observer = "memoryless_minmax"
    inputs = _record(model, lambda args, _: args[0])
    outputs = _record(model, lambda _, output: output)
    groups = {f"group_{i}": each for i, each in enumerate(copy.deepcopy(schemes))}
    config = QuantizationConfig(config_groups=groups, ignore=list(ignore), kv_cache_scheme=kv_cache)
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        found = getattr(module, "quantization_scheme", None)
        if found is None:
            continue
        if isinstance(module, nn.Linear):
            _set(module, "weight", found.weights, module.weight.data)
            _set(module, "input", found.input_activations, inputs[name])
        else:
            for part in ("q", "k", "v"):
                states = outputs[f"{name}.{part}_proj"].unflatten(-1, (-1, module.head_dim))
                _set(module, part, found.input_activations, states.transpose(1, 2))
        module.quantization_status = QuantizationStatus.FROZEN
    return model


def _record(
    model: PreTrainedModel, choose: Callable[[Any, torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def hook(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
                seen[name] = choose(args, output).detach()

            hooks.append(module.register_forward_hook(hook))
    logits_of(model)
    for handle in hooks:
        handle.remove()
    return seen


def _set(
    module: nn.Module, base_name: str, args: QuantizationArgs | None, seen: torch.Tensor
) -> None:
    if args is None or args.dynamic is True:
        return
    observer = Observer.load_from_registry("memoryless_minmax", base_name=base_name, args=args)
    for key, value in observer(seen).get_qparams().items():
        parameter = getattr(module, f"{base_name}_{key}", None)
        if parameter is not None and value is not None:
            parameter.data.copy_(value.reshape(parameter.shape))


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(TOKENS, use_cache=False).logits


class Expert(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            setattr(self, name, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Experts as modules of their own, each of which sees all tokens."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        for i, parts in enumerate(zip(fused.gate_up_proj, fused.down_proj, strict=True)):
            self.add_module(str(i), Expert(*(part.detach() for part in parts)))

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        outputs = torch.stack([expert(hidden) for expert in self.children()])
        shares = torch.zeros(len(outputs), len(hidden), dtype=hidden.dtype)
        shares.scatter_(0, chosen.T, weights.T.to(hidden.dtype))
        return (outputs * shares.unsqueeze(-1)).sum(0)


def unfuse(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp.experts = Experts(layer.mlp.experts)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(126)} | {"<pad>": 126, "<unk>": 127}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast
