"""Random Llamas: of any depth, written to disk without being in memory as a whole; a small one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SHARD = 500_000_000


def llama(layers: int) -> LlamaConfig:
    """Return the shape of a model that has a billion parameters with 22 layers."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )


def write_model(folder: Path, layers: int) -> None:
    """Write a random Llama, of which one file at a time is in memory; its config comes last."""
    config = llama(layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    where: dict[str, str] = {}
    for index_of, shapes in enumerate(shards(model.state_dict())):
        file = f"model-{index_of:05d}.safetensors"
        tensors = {name: random_tensor(shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


def shards(state: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Size]]:
    """Share tensors out among files."""
    shapes: dict[str, torch.Size] = {}
    size = 0
    for name, tensor in state.items():
        size += 2 * tensor.numel()
        if size > SHARD and shapes:
            yield shapes
            shapes, size = {}, 2 * tensor.numel()
        shapes[name] = tensor.shape
    yield shapes


def random_tensor(shape: torch.Size) -> torch.Tensor:
    """Return values as those of a trained model are: most of them small, a few far out."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
    values.view(-1)[:: 1 << 16] *= 20
    return values


def quantized_weights(layers: int) -> int:
    """Return how many weights of a model are quantized: those of its layers."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(llama(layers))  # type: ignore[no-untyped-call]
    modules = model.model.layers.modules()
    return sum(each.weight.numel() for each in modules if isinstance(each, torch.nn.Linear))


def llama_100m() -> Any:
    """Return a random model of 95 million parameters, as wide as such models are."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        tie_word_embeddings=True,
    )
    build: Any = LlamaForCausalLM
    return build(config).eval()
