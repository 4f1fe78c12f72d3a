"""The weights of a real language model, where it is at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4
from safetensors import safe_open
from torch import Tensor

import calipers
from calipers.observers import Observer
from calipers.solvers.tuning import divergence

SHARED = Path(os.environ.get("CALIPERS_SHARED", Path(__file__).parents[2] / "shared"))
MODEL = SHARED / "models" / "stories15M" / "model.safetensors"
INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=96)
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is not there")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    with safe_open(MODEL, "pt") as file:
        names = [name for name in file.keys() if "layers.3." in name and "proj" in name]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def activations(channels: int) -> Tensor:
    """Some channels are used much more than others, and neighbours together."""
    torch.manual_seed(0)
    strength = torch.exp(torch.randn(channels))
    x = torch.randn(400, channels)
    return (x + 0.5 * x.roll(1, -1)) * strength


@pytest.mark.parametrize("args", [INT4, FP8, nvfp4(16)], ids=str)
@pytest.mark.parametrize("importance", ["none", "imatrix", "hessian"])
def test_no_classic_observer_is_better(
    weights: dict[str, Tensor], importance: str, args: QuantizationArgs
) -> None:
    assert len(weights) == 7
    for weight in weights.values():
        linear = torch.nn.Linear(weight.shape[1], 1)
        observer = Observer.load_from_registry(
            "optimal", base_name="weight", args=args, importance=importance, strict=True
        )
        observer.attach(linear)
        linear(activations(weight.shape[1]))
        observer.detach(linear)
        report = observer(weight).report()
        assert report.chosen < report.mse
        assert report.chosen < report.minmax


@pytest.mark.slow
def test_tuning_helps_on_stories_that_it_has_not_seen() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = MODEL.parent
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (SHARED / "text" / "stories-calibration.jsonl").read_text().splitlines()
    stories = [tokenizer(json.loads(line)["text"])["input_ids"][:96] for line in lines]
    weights = {"num_bits": 3, "strategy": "group", "group_size": 32}
    step = calipers.QuantizationModifier(weights=weights, targets=["Linear"], ignore=["lm_head"])
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def nats(*more: object) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        calipers.oneshot(
            model, [step, *more], stories[:24], num_calibration_samples=24, progress=False
        )
        pairs = (
            [each(torch.tensor([story])).logits for each in (teacher, model)]
            for story in stories[300:320]
        )
        return sum(float(divergence(*pair)) for pair in pairs)

    assert nats(calipers.TuningModifier(epochs=1, lr=1e-3)) < 0.97 * nats()
