"""Damage to files: what disks, editors and enemies do to bytes, JSON, YAML and tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]
_DEEP = 100_000
_SURROGATE = "\ud800"
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 7, 10**12, 10**30, 2**63, -(2**63), 0.5, -0.0, 1e-300, 1e308),
    *(float("nan"), float("inf"), "", "0", "null", "../../etc/passwd", "\0", _SURROGATE, "é" * 50),
    *([], {}, [[]], [None], {"a": {}}, ["x"] * 3, list(range(70))),
)


def some_bytes(content: bytes, random: Random) -> bytes:
    """Damage bytes without knowing what they mean."""
    return random.choice(_BYTES)(content, random)


def _flip_bits(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: random.choice((0, 1, len(content) - 1, random.randrange(len(content))))]


def _delete(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content))
    return content[:start] + content[start + random.choice((1, 2, 8, 64)) :]


def _insert(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content) + 1)
    added = random.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"}", b'"', random.randbytes(9)))
    return content[:start] + added + content[start:]


def _overwrite(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content))
    length = min(random.choice((1, 4, 64, 512)), len(content) - start)
    filled = random.choice((bytes(length), b"\xff" * length, random.randbytes(length)))
    return content[:start] + filled + content[start + length :]


def _repeat(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content))
    part = content[start : start + random.choice((1, 8, 100))]
    return content[:start] + part + content[start:]


_BYTES: Sequence[Mutation] = (
    _flip_bits,
    _flip_bits,
    _truncate,
    _delete,
    _insert,
    _overwrite,
    _repeat,
)


def some_json(content: bytes, random: Random) -> bytes:
    """Change what a JSON file says; one in four is damaged without regard to that."""
    if random.random() < 0.25:
        return some_bytes(content, random)
    return json_text(changed_tree(json.loads(content), random), random)


_ADDED: Sequence[tuple[str, Any]] = (
    *(("attention_bias", True), ("mlp_bias", True), ("tie_word_embeddings", True)),
    *(("num_hidden_layers", n) for n in (0, 1, 3, 40, 10**6, 10**9)),
    *(("hidden_size", n) for n in (16, 64, 10**9, 10**12)),
    *(("num_key_value_heads", 2), ("num_attention_heads", 4), ("head_dim", 8), ("head_dim", 10**9)),
    *(("intermediate_size", 10**12), ("vocab_size", 259), ("vocab_size", 10**12)),
    *(("num_local_experts", 2), ("num_local_experts", 10**9), ("num_experts_per_tok", 99)),
    *(("model_type", kind) for kind in ("mistral", "qwen2", "qwen3", "gpt2", "gemma2", "mixtral")),
    *(("model_type", kind) for kind in ("t5", "bert", "deepseek_v3", "mamba", "llama4", "phi3")),
    *(
        ("dtype", kind)
        for kind in ("float32", "float16", "float64", "int8", "auto", "Tensor", None)
    ),
    *(("return_dict", False), ("output_attentions", True), ("output_hidden_states", True)),
    *(("is_encoder_decoder", True), ("use_cache", False), ("num_labels", 10**9)),
    *(("id2label", {"x": "y"}), ("pruned_heads", {"0": [0]}), ("chunk_size_feed_forward", 3)),
    *(("rope_theta", 5), ("rope_theta", 0), ("rope_scaling", {"rope_type": "yarn"})),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}),
    *(("sliding_window", 1), ("sliding_window", 0), ("layer_types", ["x", "y"])),
    *(("rms_norm_eps", 1e-2), ("rms_norm_eps", float("nan")), ("hidden_act", "gelu")),
    *(("max_position_embeddings", 0), ("max_position_embeddings", 10**12), ("pad_token_id", 10**6)),
    *(("transformers_weights", "../x.safetensors"), ("auto_map", {"AutoConfig": "code.Config"})),
    *(("_name_or_path", "/"), ("_commit_hash", "x"), ("architectures", ["T5Model"])),
    *(("_attn_implementation", "flash_attention_2"), ("attn_implementation", "eager")),
    *(("quantization_config", {}), ("quantization_config", {"quant_method": "gptq", "bits": 4})),
    *(("quantization_config", {"quant_method": "compressed-tensors"}), ("text_config", {"a": 1})),
    *(("transformers_version", "99.0"), ("torch_dtype", "float32"), ("tp_plan", "x")),
)


def some_config(content: bytes, random: Random) -> bytes:
    """Change a config.json; half of the time to one that is read as that of another model."""
    if random.random() < 0.5:
        return some_json(content, random)
    config = json.loads(content)
    config.update(random.sample(_ADDED, random.choice((1, 1, 2))))
    return json_text(config, random)


def json_text(tree: Any, random: Random) -> bytes:
    """Write a tree; marks in it become what json.dumps cannot write."""
    text = json.dumps(tree, ensure_ascii=random.random() < 0.9, indent=random.choice((None, 1)))
    deep = "[" * _DEEP + "]" * _DEEP
    text = text.replace('"<deep>"', deep).replace('"<cut>"', "[" * _DEEP)
    return text.replace("<same key>", "").encode("utf-8", "surrogatepass")


def changed_tree(tree: Any, random: Random) -> Any:
    """Change one or two places of a tree of dicts and lists."""
    for _ in range(random.choice((1, 1, 1, 2))):
        places = list(_places(tree))
        if not places:
            return random.choice(_ODD_VALUES)
        # The upper levels are where the meaning is, the lower ones where most places are.
        some = random.sample(places, min(6, len(places)))
        _change_place(*min(some, key=lambda place: place[2])[:2], random)
    return tree


def _places(tree: Any, depth: int = 0) -> Any:
    keys = (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    )
    for key in keys:
        yield tree, key, depth
        yield from _places(tree[key], depth + 1)


def _change_place(owner: Any, key: Any, random: Random) -> None:
    value = owner[key]
    kind = random.randrange(9)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[random.choice((f"{key}s", key.upper(), key[1:], _SURROGATE, ""))] = owner.pop(key)
    elif kind == 2 and isinstance(owner, dict):
        owner[f"{key}<same key>"] = random.choice((value, *_ODD_VALUES))  # written as the same key
    elif kind == 3:
        owner[key] = random.choice(("<deep>", "<cut>"))
    elif kind == 4:
        other = random.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
        owner[key], owner[other] = owner[other], owner[key]
    elif kind == 5 and isinstance(value, list):
        owner[key] = random.choice((value[1:], value * 2, [*value, None], value[::-1]))
    elif kind == 6 and isinstance(value, (int, float)):
        owner[key] = random.choice((value + 1, value - 1, value * 2, -value, str(value), [value]))
    elif kind == 7 and isinstance(value, str):
        owner[key] = random.choice((value[::-1], value + "x", value[:-1], value * 3, 5, [value]))
    else:
        owner[key] = random.choice(_ODD_VALUES)


_TEMPLATES = (
    *("{% for m in messages %}", "{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ x.y.z() }}"),
    *("{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**11 }}", "{{ messages }}", "\0"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% include '/etc/passwd' %}", ""),
    *("{{ ''.__class__.__mro__ }}", "{% set messages = 3 %}{{ messages.x }}", "{# open", "\ud800"),
)


def some_template(content: bytes, random: Random) -> bytes:
    """Change a chat template, which is a program."""
    if random.random() < 0.5:
        return some_bytes(content, random)
    return random.choice(_TEMPLATES).encode("utf-8", "surrogatepass")


def some_lines(content: bytes, random: Random) -> bytes:
    """Change the lines of JSON of a data file."""
    if random.random() < 0.3:
        return some_bytes(content, random)
    lines = content.split(b"\n")
    index = random.randrange(len(lines))
    kind = random.randrange(4)
    if kind == 0:
        lines[index] = random.choice((b"", b"null", b"[]", b"{}", b"3", b'"x"', b"[1, 2", b"\xff"))
    elif kind == 1:
        lines[index] = b"[" * _DEEP
    elif lines[index]:
        lines[index] = json_text(changed_tree(json.loads(lines[index]), random), random)
    return b"\n".join(lines)


_YAML = (
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c, *c, *c]\n",
    "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12)),
    "a: &a {b: *a}\n",
    "? [complex, key]\n: 1\n",
    "!!python/object/apply:os.system ['true']\n",
    "modifiers: !!set {a, b}\n",
    "a: 2001-99-99\n",
    "a: 0x" + "f" * 9000 + "\n",
    "n: " + "9" * 6000 + "\n",
    "<<: 3\n",
    "%YAML 9.9\n---\na: 1\n",
    "--- a\n--- b\n",
    "\t- tab\n",
    "a: \x07\n",
    "[" * 3000,
    "- " * 3000,
    "{a: " * 3000,
    "\ufeffa: 1",
)


def some_yaml(content: bytes, random: Random) -> bytes:
    """Change a recipe: its bytes, its lines, or the values in it."""
    kind = random.randrange(5)
    if kind == 0:
        return some_bytes(content, random)
    lines = content.decode().split("\n")
    index = random.randrange(len(lines))
    if kind == 1:
        lines[index] = random.choice(("", "  " + lines[index], lines[index].strip(), lines[0]))
    elif kind == 2:
        lines.insert(index, random.choice((lines[index], random.choice(_YAML))))
    elif kind == 3:
        return random.choice(_YAML).encode()
    else:
        key, colon, _ = lines[index].partition(":")
        value = json.dumps(random.choice(_ODD_VALUES))
        words = ("optimal", "GPTQ", "*", "re:(", "W4A16", "tensor", "group", "-128", "99999999999")
        lines[index] = key + colon + " " + random.choice((value, random.choice(words)))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def some_tensors(content: bytes, random: Random) -> bytes:
    """Damage a safetensors file: its header in every way, sometimes its values."""
    length = struct.unpack("<Q", content[:8])[0]
    head, body = content[8 : 8 + length], content[8 + length :]
    kind = random.randrange(6)
    if kind == 0:
        return _truncate(content, random)
    if kind == 1:
        wrong = random.choice((0, 1, length - 1, length + 1, length + 8, 2**63, 2**64 - 1, 10**9))
        return struct.pack("<Q", wrong) + head + body
    if kind == 2:
        return content[:8] + some_bytes(head, random)[:length].ljust(length) + body
    if kind == 3:
        return struct.pack("<Q", length) + head + some_bytes(body, random)
    header = json.loads(head)
    if kind == 4:
        header = changed_tree(header, random)
    else:
        body = _changed_tensors(header, body, random)
    return joined_tensors(json_text(header, random), body)


def joined_tensors(head: bytes, body: bytes) -> bytes:
    """Return a safetensors file of a header and its tensors."""
    return struct.pack("<Q", len(head)) + head + body


def _changed_tensors(header: dict[str, Any], body: bytes, random: Random) -> bytes:
    """Change entries of a header in ways that leave it a header."""
    name = random.choice([key for key in header if key != "__metadata__"])
    other = random.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    kind = random.randrange(9)
    if kind == 0:
        entry["shape"] = entry["shape"][::-1]
    elif kind == 1:
        entry["dtype"] = random.choice(("F32", "I32", "U32", "F16", "BF16", "F64", "I8", "F4", "?"))
    elif kind == 2:
        entry["data_offsets"] = [
            offset + random.choice((-4, 4, 8)) for offset in entry["data_offsets"]
        ]
    elif kind == 3:
        header[name], header[other] = header[other], header[name]
    elif kind == 4:
        header[f"{name}<same key>"] = header[other]
    elif kind == 5:
        number = random.choice((0, 1, 2, 3, 9, 10**9))
        parts = name.split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()] or [0]
        parts[random.choice(places)] = str(number)
        header[".".join(parts)] = header.pop(name)
    elif kind == 6:
        entry["shape"] = [1, *entry["shape"]]
    elif kind == 7:
        header["extra.weight"] = {**entry, "data_offsets": [len(body), len(body) + 4], "shape": [1]}
        return body + bytes(4)
    else:
        return _without(header, name, body)
    return body


def _without(header: dict[str, Any], name: str, body: bytes) -> bytes:
    """Take a tensor out so that the rest is a sound file."""
    start, end = header.pop(name)["data_offsets"]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - start) for offset in entry["data_offsets"]]
    return body[:start] + body[end:]
