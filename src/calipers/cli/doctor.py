"""``calipers doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from calipers.cli.app import CommandOutput
from calipers.cli.main import WAITING
from calipers.cli.rendering import facts_table
from calipers.errors import format_size

_PACKAGES = (
    *("calipers", "torch", "compressed-tensors", "transformers", "safetensors", "huggingface-hub"),
    *("pydantic", "typer", "rich", "datasets", "pyarrow", "llmcompressor", "vllm"),
)


def doctor() -> CommandOutput:
    """Say what is installed, and which kernels run and why.

    Example: calipers doctor
    """
    import torch

    from calipers.kernels import describe
    from calipers.runtime.precision import computes_fast

    kernels, cpu = describe(), torch.device("cpu")
    data: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernels": asdict(kernels),
        "devices": _devices(),
        # dtypes that the CPU has instructions for; others it computes in float32
        "forward_pass": {
            "bfloat16": computes_fast(torch.bfloat16, cpu),
            "float16": computes_fast(torch.float16, cpu),
        },
        "cores": os.cpu_count(),
        "threads": {
            "number": torch.get_num_threads(),
            "waiting": {name: os.environ[name] for name in WAITING if name in os.environ},
        },
        "memory": _memory(),
        "disk": {"folder": os.getcwd(), "free": shutil.disk_usage(".").free},
    }
    memory, threads = data["memory"], data["threads"]
    waiting = [f"{name}={value}" for name, value in threads["waiting"].items()]
    how = ", ".join(waiting) or f"they spin while they wait; {WAITING[0]}=PASSIVE lets them sleep"
    forward_pass = [
        f"{name} models: in {name}"
        if is_fast
        else f"{name} models: in float32, since this CPU has no {name} instructions (see --dtype)"
        for name, is_fast in data["forward_pass"].items()
    ]
    view = facts_table(
        {
            "python": f"{data['python']}, {data['executable']}",
            "platform": data["platform"],
            **{name: found or "not installed" for name, found in data["packages"].items()},
            "kernels": str(kernels),
            "devices": "\n".join(f"{d['name']}: {d['description']}" for d in data["devices"]),
            "forward pass": "\n".join(forward_pass),
            "cores": str(data["cores"]),
            "threads": f"{threads['number']} ({how})",
            "memory": "unknown"
            if memory is None
            else f"{format_size(memory['free'])} of {format_size(memory['total'])} free",
            "disk": f"{format_size(data['disk']['free'])} free in {data['disk']['folder']}",
        }
    )
    return CommandOutput(data, view)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """Return what torch can compute on, the CPU first."""
    import torch

    devices = [{"name": "cpu", "description": platform.processor() or "CPU"}]
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        for index in range(torch.accelerator.device_count()):
            name = device.type
            if name == "cuda":
                name = torch.cuda.get_device_name(index)
            free, total = torch.accelerator.get_memory_info(index)
            memory = f"{format_size(free)} of {format_size(total)} free"
            devices.append({"name": f"{device.type}:{index}", "description": f"{name}, {memory}"})
    return devices


def _memory() -> dict[str, int] | None:
    """Return the bytes of memory, and those that are free; None where nobody tells."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        pages = {"total": os.sysconf("SC_PHYS_PAGES"), "free": os.sysconf("SC_AVPHYS_PAGES")}
    except (AttributeError, ValueError, OSError):
        return None
    return {name: page * count for name, count in pages.items()}
