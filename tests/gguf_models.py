"""Models in GGUF, written with the library of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from words import LETTERS


def write_gguf(model: Any, file: Path, kind: str = "F16") -> dict[str, torch.Tensor]:
    """Write a qwen2 model of families.py, and return its tensors as they are in the file.

    :param kind: how matrices are stored; everything else is in float32
    """
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*LETTERS, "ab", "cd", "<|end|>", "<|rest|>"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(len(LETTERS) + 2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    wanted, stored = gguf.GGMLQuantizationType[kind], {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = wanted if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(tensor.float().numpy(), own)
        found = gguf.dequantize(data, own).astype(np.float32)
        stored[name] = torch.from_numpy(found.reshape(tensor.shape).copy())
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(called, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
