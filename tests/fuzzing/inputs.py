"""The kinds of input that are damaged, each with sound files and the commands that read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from fuzzing import mutations
from fuzzing.mutations import Mutation
from models import random_model
from transformers import LlamaConfig, MixtralConfig
from words import byte_tokenizer

import calipers

_SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
TEXTS = [f"Line {i}: the quick brown fox jumps over the lazy dog." for i in range(24)]
RECIPE = """\
quantization_stage:
  quantization_modifiers:
    QuantizationModifier:
      ignore: [lm_head]
      weight_observer: {name: mse, grid: 20}
      config_groups:
        group_0:
          targets: [Linear]
          weights:
            num_bits: 4
            type: int
            symmetric: true
            strategy: group
            group_size: 16
          input_activations:
            num_bits: 8
            type: int
            symmetric: false
            dynamic: true
            strategy: token
"""
_QUANTIZE = "quantize {model} -o {output} --scheme FP8_DYNAMIC"
_MEASURED = "quantize {model} -o {output} --scheme FP8 --measurements {measurements}"
_PLAN = "plan {model} --scheme FP8_DYNAMIC"
_FEW = "--data {data} --samples 3 --seq-len 16"
_STATIC = f"quantize {{model}} -o {{output}} --scheme FP8 --calibrate-all-experts {_FEW}"
_EVALUATE = f"evaluate {{model}} {_FEW}"
_COMPARE = f"evaluate {{model}} {{checkpoint}} {_FEW}"


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    :param file: what is damaged, in the folder of inputs
    :param mutate: how
    :param commands: what reads it; {model}, {data}, {output} and others are paths
    """

    name: str
    file: str
    mutate: Mutation
    commands: Sequence[str]


def _kinds() -> dict[str, list[Kind]]:
    def kinds(name: str, files: Sequence[str], mutate: Mutation, *commands: str) -> list[Kind]:
        return [Kind(name, file, mutate, commands) for file in files]

    some_json = mutations.some_json
    lazily = f"{_STATIC} --pipeline sequential"
    found = [
        *kinds(
            *("config", ("llama/config.json", "mixtral/config.json"), mutations.some_config),
            *(_QUANTIZE, _PLAN, _STATIC, _EVALUATE, lazily),
        ),
        *kinds(
            *("weights", ("llama/model.safetensors", "mixtral/model.safetensors")),
            *(mutations.some_tensors, _QUANTIZE, _QUANTIZE, _PLAN, lazily, _EVALUATE),
        ),
        *kinds(
            *("index", ("sharded/model.safetensors.index.json",), some_json),
            *(_QUANTIZE, _PLAN, lazily, _EVALUATE),
        ),
        *kinds(
            *("tokenizer", ("llama/tokenizer.json", "llama/tokenizer_config.json"), some_json),
            *(_STATIC, _EVALUATE, _QUANTIZE),
        ),
        *kinds(
            *("tokenizer", ("llama/chat_template.jinja",), mutations.some_template),
            *(_STATIC.replace("{data}", "{chats}"),),
        ),
        *kinds(
            *("generation", ("llama/generation_config.json",), some_json, _QUANTIZE),
            *(_STATIC, _PLAN),
        ),
        *kinds("data", ("text.jsonl", "chats.jsonl"), mutations.some_lines, _STATIC, _EVALUATE),
        *kinds("data", ("text.json",), some_json, _STATIC, _EVALUATE),
        *kinds("data", ("text.txt", "text.parquet"), mutations.some_bytes, _STATIC, _EVALUATE),
        *kinds(
            *("recipe", ("recipe.yaml",), mutations.some_yaml),
            *("plan {model} --recipe {recipe}", "quantize {model} -o {output} --recipe {recipe}"),
        ),
        *kinds(
            *("measurements", ("m.safetensors",), mutations.some_tensors),
            *("show {measurements}", "merge {measurements} {other} -o {output}", _MEASURED),
        ),
        *kinds("checkpoint", ("w4a16/config.json",), mutations.some_config, _COMPARE),
        *kinds("checkpoint", ("w4a16/model.safetensors",), mutations.some_tensors, _COMPARE),
    ]
    names = dict.fromkeys(kind.name for kind in found)
    return {name: [kind for kind in found if kind.name == name] for name in names}


KINDS = _kinds()


@dataclass(frozen=True)
class Case:
    """One damaged file, and the command that meets it; the same number is always the same case."""

    kind: str
    number: int

    def prepare(self, sound: Path, folder: Path) -> list[str]:
        """Put inputs into a folder, one of them damaged; return the words of the command."""
        random = Random(f"{self.kind} {self.number}")
        kinds = KINDS[self.kind]
        kind = kinds[self.number % len(kinds)]
        damaged = folder / kind.file
        model = kind.file.split("/")[0] if "/" in kind.file else "llama"
        paths = {
            "model": folder / ("llama" if model == "w4a16" else model),
            "data": folder / (kind.file if self.kind == "data" else "text.jsonl"),
            "chats": folder / "chats.jsonl",
            "checkpoint": folder / "w4a16",
            "recipe": folder / "recipe.yaml",
            "measurements": folder / "m.safetensors",
            "other": folder / "other.safetensors",
            "output": folder / "out",
        }
        command = kind.commands[random.randrange(len(kind.commands))]
        for name, path in paths.items():
            if f"{{{name}}}" in command and path != paths["output"]:
                _copy(sound / path.relative_to(folder), path)
        content = (sound / kind.file).read_bytes()
        mutated = kind.mutate(content, random)
        if not damaged.parent.exists():
            _copy(sound / damaged.parent.relative_to(folder), damaged.parent)
        damaged.write_bytes(mutated)
        return command.format(**{name: str(path) for name, path in paths.items()}).split(" ")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def make_sound(folder: Path) -> Path:
    """Write sound inputs of every kind."""
    folder.mkdir()
    llama = random_model(LlamaConfig(**_SIZES, tie_word_embeddings=False), torch.bfloat16)
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    mixtral = random_model(MixtralConfig(**_SIZES, **experts), torch.bfloat16)
    for name, model in {"llama": llama, "mixtral": mixtral}.items():
        model.save_pretrained(folder / name)
        byte_tokenizer(bos=True, eos=True, chat=True).save_pretrained(folder / name)
    llama.save_pretrained(folder / "sharded", max_shard_size="40KB")
    byte_tokenizer(bos=True).save_pretrained(folder / "sharded")
    calipers.oneshot(folder / "llama", RECIPE, output_dir=folder / "w4a16", progress=False)
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    records = [{"text": text, "number": i} for i, text in enumerate(TEXTS)]
    _write_lines(folder / "text.jsonl", records)
    _write_lines(folder / "chats.jsonl", chats)
    (folder / "text.json").write_text(json.dumps(records))
    (folder / "text.txt").write_text("\n".join(TEXTS))
    (folder / "recipe.yaml").write_text(RECIPE)
    few = {"num_samples": 3, "max_seq_length": 16, "progress": False}
    for name, texts in {"m": TEXTS, "other": TEXTS[3:]}.items():
        found = calipers.measure(llama, texts, tokenizer=folder / "llama", **few)
        found.save(folder / f"{name}.safetensors")
    _write_parquet(folder / "text.parquet")
    return folder


def _write_lines(path: Path, records: Sequence[object]) -> None:
    path.write_text("\n".join(map(json.dumps, records)))


def _write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
