"""What may come of a damaged input: a refusal in words, or a result that is what the files say."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from typer.testing import Result

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_OTHERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
OUR_BUG = 70


def snapshot(folder: Path) -> dict[str, str]:
    """Return a digest of every file of a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def judge(result: Result, folder: Path, before: dict[str, str], command: list[str]) -> str:
    """Return how a case ended; what must not happen begins with ``BAD``."""
    output = folder / "out"
    after = snapshot(folder)
    written = {name for name in after if name == "out" or name.startswith("out/")}
    if {name: after[name] for name in after if name not in written} != before:
        return "BAD: files outside of the output were changed"
    if result.exit_code != 0:
        return _judge_refusal(result, bool(written) or output.exists())
    if command[0] != "quantize":
        return "done"
    try:
        return _judge_output(command, output)
    except Exception as error:
        return f"BAD: the output does not load: {type(error).__name__}: {error}"


def _judge_refusal(result: Result, has_output: bool) -> str:
    text = result.stderr
    if result.exit_code == OUR_BUG or "This looks like a bug" in text:
        return f"BAD: exit 70: {text.strip()[-600:]}"
    if not isinstance(result.exception, SystemExit) or "Traceback" in text:
        return f"BAD: {type(result.exception).__name__}: {result.exception}"
    if not text.rpartition("Error: ")[2].strip():
        return f"BAD: exit {result.exit_code} without a word"
    if has_output:
        return "BAD: refused, and an output is left"
    return f"refused, exit {result.exit_code}"


def _judge_output(command: list[str], output: Path) -> str:
    """Compare what was written with the files of the model, read without any library."""
    stored, written = read_tensors(Path(command[1])), read_tensors(output)
    if "--recipe" in command:
        written = {n: t for n, t in written.items() if n in stored and f"{n}_scale" not in written}
    else:
        written = {name: _dequantized(name, written) for name in written if "_scale" not in name}
        missing = stored.keys() - written.keys()
        if missing and not _is_tied(missing, stored):
            return f"BAD: the output lacks {sorted(missing)}"
    for name, tensor in written.items():
        if name not in stored:
            return f"BAD: the output has {name}, which no file holds"
        if not _is_near(tensor, stored[name]):
            return f"BAD: {name} is not what the file says"
    _, told = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    unexpected = [key for key in told["unexpected_keys"] if "experts" not in key]
    if told["missing_keys"] or unexpected:
        return f"BAD: transformers misses {told['missing_keys']}, has no place for {unexpected}"
    return "done"


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder; not with safetensors, which is what is under test."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = {**_DTYPES, **_OTHERS}[entry["dtype"]]
            found[name] = torch.frombuffer(content[begin:end], dtype=dtype).reshape(entry["shape"])
    return found


def _dequantized(name: str, written: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor = written[name].float()
    scale = written.get(f"{name}_scale")
    return tensor if scale is None else tensor * scale.float()


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether nothing but the rounding to fp8, with a scale per row, lies between two tensors."""
    one, other = one.float(), other.float()
    if one.shape != other.shape:
        return False
    tiny = other.abs().max() / 448 / 512 if other.numel() else 0
    near = (one - other).abs() <= other.abs() / 14 + tiny
    return bool((near | (one == other) | (one.isnan() & other.isnan())).all())


def _is_tied(missing: set[str], stored: dict[str, torch.Tensor]) -> bool:
    """Whether all that is missing is an output layer that is the same as the embedding."""
    head, embedding = (stored.get(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    same = head is not None and embedding is not None and torch.equal(head, embedding)
    return missing == {"lm_head.weight"} and same
