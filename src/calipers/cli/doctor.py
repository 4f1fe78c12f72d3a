"""``calipers doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from calipers.cli import WAITING
from calipers.cli.command import CommandOutput
from calipers.cli.formatting import format_size
from calipers.cli.tables import facts_table

if TYPE_CHECKING:
    from rich.console import RenderableType

_PACKAGES = (
    *("calipers", "torch", "compressed-tensors", "transformers", "safetensors", "huggingface-hub"),
    *("pydantic", "typer", "rich", "datasets", "pyarrow", "llmcompressor", "vllm"),
)


def doctor() -> CommandOutput:
    """Say what is installed, and which kernels run and why.

    Example: calipers doctor
    """
    from calipers.kernels import describe

    kernels = describe()
    data = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernels": asdict(kernels),
        "devices": _devices(),
        "forward_pass": _forward_pass(),
        "cores": os.cpu_count(),
        "threads": _threads(),
        "memory": _memory(),
        "disk": {"folder": os.getcwd(), "free": shutil.disk_usage(".").free},
    }
    return CommandOutput(data, _view(data, str(kernels)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """Return what torch can compute on, the CPU first."""
    import torch

    found: list[dict[str, Any]] = [{"name": "cpu", "description": platform.processor() or "CPU"}]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        for index in range(torch.accelerator.device_count()):
            found.append({"name": f"{kind.type}:{index}", "description": _described(kind, index)})
    return found


def _forward_pass() -> dict[str, bool]:
    """Return for which narrow dtypes the CPU has instructions; others it computes in float32."""
    import torch

    from calipers.runtime.precision import computes_fast

    cpu = torch.device("cpu")
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return {name: computes_fast(dtype, cpu) for name, dtype in dtypes.items()}


def _described(kind: Any, index: int) -> str:
    import torch

    name = torch.cuda.get_device_name(index) if kind.type == "cuda" else kind.type
    free, total = torch.accelerator.get_memory_info(index)
    return f"{name}, {format_size(free)} of {format_size(total)} free"


def _threads() -> dict[str, Any]:
    """Return how many threads of torch compute, and what was set of how they wait."""
    import torch

    set_to = {name: os.environ[name] for name in WAITING if name in os.environ}
    return {"number": torch.get_num_threads(), "waiting": set_to}


def _memory() -> dict[str, int] | None:
    """Return the bytes of memory, and those that are free; None where nobody tells."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        pages = {"total": os.sysconf("SC_PHYS_PAGES"), "free": os.sysconf("SC_AVPHYS_PAGES")}
    except (AttributeError, ValueError, OSError):
        return None
    return {name: page * count for name, count in pages.items()}


def _view(data: dict[str, Any], kernels: str) -> RenderableType:
    memory = data["memory"]
    facts = {
        "python": f"{data['python']}, {data['executable']}",
        "platform": data["platform"],
        **{name: found or "not installed" for name, found in data["packages"].items()},
        "kernels": kernels,
        "devices": "\n".join(f"{each['name']}: {each['description']}" for each in data["devices"]),
        "forward pass": _in_words(data["forward_pass"]),
        "cores": str(data["cores"]),
        "threads": _threads_in_words(data["threads"]),
        "memory": "unknown" if memory is None else _free_of(memory),
        "disk": f"{format_size(data['disk']['free'])} free in {data['disk']['folder']}",
    }
    return facts_table(facts)


def _threads_in_words(threads: dict[str, Any]) -> str:
    waiting = [f"{name}={value}" for name, value in threads["waiting"].items()]
    told = ", ".join(waiting) or f"they spin while they wait; {WAITING[0]}=PASSIVE lets them sleep"
    return f"{threads['number']} ({told})"


def _free_of(memory: dict[str, int]) -> str:
    return f"{format_size(memory['free'])} of {format_size(memory['total'])} free"


def _in_words(forward_pass: dict[str, bool]) -> str:
    """Say in which dtype models of each narrow dtype run on the CPU."""
    return "\n".join(
        f"{name} models: in {name}"
        if fast
        else f"{name} models: in float32, since this CPU has no {name} instructions (see --dtype)"
        for name, fast in forward_pass.items()
    )
