"""What the processes of a job tell each other: plain data and tensors, encoded so that reading them
can run no code."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist

_STRUCTURE = "structure"
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Give plain data and tensors to all processes, and get what each gave, tensors on the CPU.

    :param group: by which the processes communicate; None for the default one. All are in it
    """
    device = communication_device(group)
    encoded = encode(mine)
    world = dist.get_world_size(group)
    size = torch.tensor([len(encoded)], device=device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size, group=group)
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(encoded.ljust(longest, b"\0")), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(received, padded.to(device), group=group)
    return [
        decode(data[: int(length)].cpu().numpy().tobytes())
        for data, length in zip(received, sizes, strict=True)
    ]


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors must be that processes send to each other."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def encode(value: Any) -> bytes:
    """Return data as a safetensors file: its tensors, and JSON that says where they belong.

    >>> decode(encode({("a", 1): [None, 0.5, {"b"}]}))
    {('a', 1): [None, 0.5, {'b'}]}
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_taken_apart(value, tensors))
    return save(tensors, {_STRUCTURE: structure})


def decode(data: bytes) -> Any:
    """Return what was encoded."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return _put_together(json.loads(header["__metadata__"][_STRUCTURE]), load(data))


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, in which all but plain values are a list: their kind, their parts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # As bytes, for not all readers of safetensors know all dtypes; in memory of their own, for
        # writers refuse tensors that share it.
        own = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        tensors[name] = own.reshape(-1).view(torch.uint8)
        return ["tensor", [name, _DTYPE_NAMES[value.dtype], list(value.shape)]]
    if isinstance(value, torch.dtype):
        return ["dtype", _DTYPE_NAMES[value]]
    if isinstance(value, dict):
        pairs = [[_taken_apart(each, tensors) for each in pair] for pair in value.items()]
        return ["dict", pairs]
    for name, kind in _SEQUENCES.items():
        if type(value) is kind:
            return [name, [_taken_apart(each, tensors) for each in value]]
    raise TypeError(f"processes cannot exchange a {type(value).__name__}")


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, parts = value
    if kind == "tensor":
        name, dtype, shape = parts
        return tensors[name].view(_DTYPES[dtype]).reshape(shape)
    if kind == "dtype":
        return _DTYPES[parts]
    if kind == "dict":
        return {_put_together(key, tensors): _put_together(each, tensors) for key, each in parts}
    return _SEQUENCES[kind](_put_together(part, tensors) for part in parts)
