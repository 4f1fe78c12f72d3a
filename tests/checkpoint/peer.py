"""A program that writes checkpoints with llm-compressor, in a process of its own: it patches
transformers for good. Arguments: the folder of a model, the folder to write to, schemes."""

from __future__ import annotations

import sys
from pathlib import Path


def main(source: str, output: str, *names: str) -> None:
    import datasets
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from frozen import KV_FP8, TOKENS, scheme, tokenizer
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    rows = {"input_ids": TOKENS.tolist(), "attention_mask": (TOKENS * 0 + 1).tolist()}
    data = datasets.Dataset.from_dict(rows)
    for name in names:
        model = linearize_moe(AutoModelForCausalLM.from_pretrained(source))
        kv_cache: QuantizationArgs | None = KV_FP8 if name.endswith("+KV") else None
        if name == "MIXED":
            groups = {
                "group_0": scheme("FP8", ("re:.*self_attn.*",)),
                "group_1": scheme("W4A16", ("re:.*mlp.*",)),
            }
        elif name == "ATTENTION":
            attention = QuantizationScheme(targets=["LlamaAttention"], input_activations=KV_FP8)
            groups = {"group_0": scheme("W8A8"), "group_1": attention}
        else:
            groups = {"group_0": scheme(name.removesuffix("+KV"))}
        modifier = QuantizationModifier(
            config_groups=groups, ignore=["lm_head"], kv_cache_scheme=kv_cache
        )
        options = {"num_calibration_samples": len(data), "max_seq_length": TOKENS.shape[1]}
        oneshot(model=model, recipe=modifier, dataset=data, processor=tokenizer(), **options)
        model.save_pretrained(Path(output) / name, save_compressed=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(*sys.argv[1:])
