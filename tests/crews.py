"""What the processes of calibration/test_distributed.py do; they import this file by name."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch
from torch import distributed as dist
from torch import multiprocessing

import calipers.entrypoint
from calipers.calibration import concluding
from calipers.calibration import pipelines as running
from calipers.entrypoint import oneshot
from calipers.errors import CalipersWarning

LONG = timedelta(seconds=60)  # nobody is missing: no process may wait in vain
SHORT = timedelta(seconds=6)  # somebody is
BOUND = 150  # seconds, for a machine with much else to do

INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}


def recipe(**options: Any) -> dict[str, Any]:
    return {"modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], **options}}}


def w8a8(observer: str, **options: Any) -> dict[str, Any]:
    weights = INT8 | {"strategy": "channel"}
    return recipe(weights=weights, input_activations=INT8 | {"observer": observer}, **options)


RECIPES = {
    "W8A8 static_minmax": w8a8("static_minmax"),
    "W8A8 histogram_mse": w8a8("histogram_mse", targets=["re:.*o_proj", "re:.*down_proj"]),
    "W8A8 percentile": w8a8("percentile"),
    "FP8": recipe(
        scheme="FP8", kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}
    ),
    "NVFP4": recipe(scheme="NVFP4"),
    "W4A16 optimal": recipe(
        scheme={"W4A16": ["Linear"]}, weight_observer={"name": "optimal", "importance": "none"}
    ),
    "W4A16 optimal imatrix": recipe(scheme={"W4A16": ["Linear"]}, weight_observer="optimal"),
}
AVERAGING = {name: w8a8(name) for name in ("minmax", "mse", "memoryless_minmax")}


# Models and data


def llama(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return models.small_llama(hidden_size=128).to(dtype).eval()


def llama_for(name: str) -> Any:
    """Sums over squares of bfloat16 are exact, so that "equal" can mean equal."""
    return llama(torch.bfloat16 if "imatrix" in name else torch.float64)


def texts(count: int, length: int = 16) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 90, (count, length), generator=generator).tolist()


def routed_mixtral() -> Any:
    """A model whose router sends token ``t`` to expert ``t % 4``, and to no other."""
    torch.manual_seed(0)
    model: Any = models.small_mixtral(num_experts_per_tok=1, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.post_attention_layernorm.weight.fill_(1)
        layer.mlp.gate.weight.zero_()
        for token in range(96):
            model.model.embed_tokens.weight[token, :4] = 0
            model.model.embed_tokens.weight[token, token % 4] = 20
        for expert in range(4):
            layer.mlp.gate.weight[expert, expert] = 1
    return model.double().eval()


def routed_texts(*experts: int) -> list[list[int]]:
    """One sample for each: all of its tokens go to that expert."""
    samples = texts(len(experts))
    return [
        [token // 4 * 4 + expert for token in sample]
        for sample, expert in zip(samples, experts, strict=True)
    ]


# One job


def quantize(
    how: Any,
    model: Any = None,
    data: Any = None,
    *,
    timeout: timedelta = LONG,
    **options: Any,
) -> Any:
    model = llama() if model is None else model
    data = texts(7) if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(The data has|.* static ranges)", CalipersWarning)
        warnings.filterwarnings("ignore", ".*saw (no|less)", CalipersWarning)
        return oneshot(model, how, data, shuffle=False, timeout=timeout, progress=False, **options)


def found(result: Any) -> dict[str, Any]:
    """Everything that must not depend on the number of processes."""
    parameters = {
        name: tensor.clone()
        for name, tensor in result.model.state_dict().items()
        if name.rsplit(".", 1)[1].endswith(("_scale", "_zero_point"))
    }
    coverage = result.coverage
    return {
        "parameters": parameters,
        "tokens": coverage.tokens,
        "applied": coverage.applied,
        "errors": dict(result.errors),
        "rows": result.plan.rows(),
    }


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    """What became of a call: its result, or the error."""
    try:
        return {"result": act(), "error": None, "text": ""}
    except Exception as error:
        return {"result": None, "error": type(error).__name__, "text": str(error)}


# What several processes do one after the other; what they return is compared.


def observers_of_all_kinds(_folder: Path) -> Any:
    return {
        (name, pipeline): found(quantize(how, llama_for(name), pipeline=pipeline))
        for name, how in (RECIPES | AVERAGING).items()
        for pipeline in ("basic", "sequential")
    }


def fewer_samples_than_processes(_folder: Path) -> Any:
    return {
        pipeline: found(quantize(RECIPES["FP8"], data=texts(2), pipeline=pipeline))
        for pipeline in ("basic", "sequential")
    }


def experts_here_and_there(_folder: Path) -> Any:
    data = routed_texts(0, 1, 2, 3)
    return {
        (name, pipeline): found(quantize(RECIPES[name], routed_mixtral(), data, pipeline=pipeline))
        for name in ("FP8", "NVFP4", "W8A8 percentile")
        for pipeline in ("basic", "sequential")
    }


def experts_nobody_sees(_folder: Path) -> Any:
    data = routed_texts(0, 1, 2)
    return {
        (name, policy): outcome(
            lambda how=how, policy=policy: found(
                quantize(how, routed_mixtral(), data, on_unseen=policy)
            )
        )
        for name, how in {
            "static_minmax": w8a8("static_minmax"),
            "memoryless_minmax": w8a8("memoryless_minmax"),
        }.items()
        for policy in ("error", "weights_only", "peers")
    }


def one_writer(folder: Path) -> Any:
    written = []

    def count(*args: Any, **kwargs: Any) -> Any:
        written.append(os.getpid())
        return write(*args, **kwargs)

    write = calipers.entrypoint.write_checkpoint
    target = folder / "checkpoint"
    with mock.patch.object(calipers.entrypoint, "write_checkpoint", count):
        result = quantize(RECIPES["FP8"], output_dir=target)
    notes = json.loads((target / "calipers.json").read_text())
    seen = {"samples": notes["samples"], "tokens": notes["tokens"]}
    again = outcome(lambda: quantize(RECIPES["FP8"], output_dir=target))
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("store"))
    return {
        "written": len(written),
        "output_dir": result.output_dir == target,
        "notes": seen,
        "again": again,
        "files": [name for name in files if not name.endswith(".pt")],
    }


def solving_in_parts(_folder: Path) -> Any:
    """Which weights this process looked at."""
    looked_at: dict[str, list[list[str]]] = {}
    real = concluding.observe
    for name in ("NVFP4", "W8A8 static_minmax", "W4A16 optimal"):
        model = llama()
        names = {module: name for name, module in model.named_modules()}

        def note(modules: Any, base_name: str, name: str = name, names: Any = names) -> None:
            looked_at.setdefault(name, []).append([names[module] for module in modules])
            real(modules, base_name)

        with mock.patch.object(concluding, "observe", note):
            quantize(RECIPES[name], model)
    return looked_at


def everywhere_something_fails(folder: Path) -> Any:
    return {stage: failing(folder, stage) for stage in FAILURES}


def different_arguments(_folder: Path) -> Any:
    rank = distributed_rank()
    other = llama()
    if rank == 2:
        other.model.layers[1].mlp.up_proj.weight.data.mul_(2)
    fp8 = RECIPES["FP8"]
    return {
        "recipe": outcome(lambda: quantize(RECIPES["NVFP4"] if rank == 1 else fp8)),
        "seed": outcome(lambda: quantize(fp8, seed=rank)),
        "model": outcome(lambda: quantize(fp8, other)),
        "pipeline": outcome(lambda: quantize(fp8, pipeline="basic" if rank else "sequential")),
        "one is short of memory": outcome(one_short_of_memory),
    }


def one_short_of_memory() -> Any:
    """One process finds that the model does not fit: all go layer by layer."""
    choice = "sequential" if distributed_rank() == 1 else "basic"
    with mock.patch.object(calipers.entrypoint, "_choose_pipeline", return_value=choice):
        return found(quantize(RECIPES["FP8"]))


JOBS = [
    observers_of_all_kinds,
    fewer_samples_than_processes,
    experts_here_and_there,
    experts_nobody_sees,
    one_writer,
    solving_in_parts,
]


# Failures


class BrokenError(Exception):
    """What fails here fails on purpose."""


FAILURES: dict[str, tuple[int, Any, str]] = {
    "loading the model": (1, calipers.entrypoint, "load_model"),
    "planning": (2, calipers.entrypoint, "plan_for"),
    "reading data": (0, calipers.entrypoint, "calibration_batches"),
    "calibrating the model": (1, running, "call_model"),
    "working out the parameters of activations": (1, concluding.Observer, "get_qparams"),
    "working out the parameters of weights": (2, concluding, "weight_error"),
    "preparing the next step": (0, calipers.entrypoint, "report_coverage"),
    "freezing the model": (1, calipers.entrypoint, "freeze"),
    "writing the checkpoint": (0, calipers.entrypoint, "write_checkpoint"),
}


@contextmanager
def broken(rank: int, where: Any, name: str, how: Any) -> Iterator[None]:
    """Let a function fail in one process."""
    if distributed_rank() != rank:
        yield
        return
    with mock.patch.object(where, name, side_effect=how):
        yield


def failing(folder: Path, stage: str) -> dict[str, Any]:
    rank, where, name = FAILURES[stage]
    model, output = llama(), folder / "nothing"
    before = description(model)
    with broken(rank, where, name, BrokenError("on purpose")):
        what = outcome(lambda: quantize(RECIPES["FP8"], model, output_dir=output))
    what["unchanged"] = description(model) == before
    what["output"] = [path.name for path in folder.iterdir() if "nothing" in path.name]
    return what


def not_a_number(folder: Path) -> dict[str, Any]:
    """The data of one process has a token whose embedding is not a number."""
    model, data = llama(), texts(7)
    with torch.no_grad():
        model.model.embed_tokens.weight[95] = torch.nan
    data[4][3] = 95
    before = description(model)
    what = outcome(lambda: quantize(RECIPES["FP8"], model, data, output_dir=folder / "nothing"))
    what["unchanged"] = description(model) == before
    return what


BAD_JOBS = [everywhere_something_fails, not_a_number, different_arguments]


def description(model: Any) -> Any:
    """All that a failed run might have left behind."""
    return [
        (
            name,
            type(module).__name__,
            sorted(vars(module)),
            sorted(module._parameters),
            sorted(module._buffers),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            "forward" in vars(module),
        )
        for name, module in model.named_modules()
    ]


# Deaths


def killed(*_args: Any, **_kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, tuple[int, Any, str]] = {
    "calibrating the model": (2, running, "call_model"),
    "exchanging results": (1, dist, "all_gather_object"),
    "merging statistics": (2, dist, "all_reduce"),
    "connecting": (1, dist, "new_group"),
}


def dying(folder: Path, stage: str, rank: int | None = None) -> dict[str, Any]:
    usual, where, name = DEATHS[stage]
    how = LateDeath(getattr(where, name)) if stage == "exchanging results" else killed
    model = llama()
    before = description(model)
    with broken(usual if rank is None else rank, where, name, how):
        what = outcome(
            lambda: quantize(RECIPES["FP8"], model, output_dir=folder / "nothing", timeout=SHORT)
        )
    what["unchanged"] = description(model) == before
    what["output"] = [path.name for path in folder.iterdir() if "nothing" in path.name]
    return what


def slow_writer(folder: Path) -> dict[str, Any]:
    """Writing takes longer than the timeout."""
    patience = timedelta(seconds=2)
    write = calipers.entrypoint.write_checkpoint

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.5 * patience.total_seconds())
        return write(*args, **kwargs)

    with mock.patch.object(calipers.entrypoint, "write_checkpoint", slowly):
        return outcome(
            lambda: found(
                quantize(RECIPES["W4A16 optimal"], output_dir=folder / "late", timeout=patience)
            )
        )


class LateDeath:
    """Dies when it is called for the fourth time, when there is something to lose."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 4:
            killed()
        return self.real(*args, **kwargs)


# Processes


def distributed_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run_jobs(rank: int, world: int, folder: str, jobs: list[Any], store: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for job in jobs:
        name = getattr(job, "func", job).__name__
        try:
            results[name] = job(Path(folder))
        except Exception:
            results[name] = traceback.format_exc()
            break
    torch.save(results, Path(folder) / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def run(world: int, folder: Path, jobs: list[Any], store: str | None = None) -> list[Any]:
    """Run jobs in several processes; None for one that did not come back.

    A server that has imported everything forks them: that takes no time.
    """
    store = store or f"file://{folder}/store"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["crews"])
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
        forkserver.ensure_running()
    processes = [
        context.Process(target=run_jobs, args=(rank, world, str(folder), jobs, store))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(BOUND)
        assert not any(process.is_alive() for process in processes), "a process hangs"
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.pt" for rank in range(world)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]
