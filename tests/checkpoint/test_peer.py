"""Names, shapes, dtypes and config.json are those that llm-compressor writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from frozen import KV_FP8, SCHEMES, freeze, llama, mixtral, qwen2_moe, scheme, unfuse
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from calipers.checkpoint.writer import write_checkpoint

pytestmark = pytest.mark.slow

pytest.importorskip("llmcompressor")

DENSE = [*SCHEMES, "FP8+KV", "MIXED", "ATTENTION"]
MOE_SCHEMES = ["W4A16", "FP8_DYNAMIC"]
Described = dict[str, tuple[list[int], str]]


def run_peer(folder: Path, model: PreTrainedModel, schemes: list[str]) -> Path:
    model.save_pretrained(folder / "source")
    program = Path(__file__).with_name("peer.py")
    command = [sys.executable, str(program), str(folder / "source"), str(folder / "peer")]
    done = subprocess.run([*command, *schemes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_peer(tmp_path_factory.mktemp("dense"), llama(torch.bfloat16), DENSE)


@pytest.fixture(scope="module", params=[mixtral, qwen2_moe], ids=["mixtral", "qwen2_moe"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    return run_peer(folder, request.param(torch.bfloat16), MOE_SCHEMES)


def described(folder: Path) -> Described:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = (part.get_shape(), part.get_dtype())
    assert found
    return found


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("name", DENSE)
def test_dense(dense: Path, name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense / "source")
    if name == "MIXED":
        attention = scheme("FP8", ("re:.*self_attn.*",))
        freeze(model, attention, scheme("W4A16", ("re:.*mlp.*",)))
    elif name == "ATTENTION":
        attention = QuantizationScheme(targets=["LlamaAttention"], input_activations=KV_FP8)
        freeze(model, scheme("W8A8"), attention)
    else:
        kv_cache = KV_FP8 if name.endswith("+KV") else None
        freeze(model, scheme(name.removesuffix("+KV")), kv_cache=kv_cache)
    ours = write_checkpoint(model, tmp_path / "out", recipe="")
    theirs = dense / "peer" / name
    assert described(ours) == described(theirs)
    assert config_of(ours) == config_of(theirs)


@pytest.mark.filterwarnings("ignore:transformers:calipers.errors.CalipersWarning")
@pytest.mark.parametrize("name", MOE_SCHEMES)
def test_experts(experts: Path, name: str, tmp_path: Path) -> None:
    model = unfuse(AutoModelForCausalLM.from_pretrained(experts / "source"))
    ours = write_checkpoint(freeze(model, scheme(name)), tmp_path / "out", recipe="")
    theirs = experts / "peer" / name
    assert described(ours) == {original(k): v for k, v in described(theirs).items()}
    ours_config, theirs_config = config_of(ours), config_of(theirs)
    # The peer leaves out the names by which transformers looks for what is ignored.
    ignore = [each["quantization_config"].pop("ignore") for each in (ours_config, theirs_config)]
    inside = {name.replace("block_sparse_moe", "mlp") for name in ignore[1]}
    assert set(ignore[0]) == inside.union(ignore[1])
    assert ours_config == theirs_config


def original(name: str) -> str:
    """The peer keeps its own names for Mixtral's experts, under which nobody finds them."""
    if "block_sparse_moe.experts" in name:
        for part, stored in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(f".{part}.", f".{stored}.")
    return name
