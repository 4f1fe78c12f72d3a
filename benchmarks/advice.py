"""Whether advice is good: predictions beside what happens, advised recipes beside uniform ones.

- ``harm``: one module of stories15M is quantized at a time, in three schemes. The increase of the
  loss that was predicted for it is held against the real one, and against the divergence of
  predictions (KL), which has less noise: rank correlation over modules.
- ``budget``: the recipe advised for 4.5 bits per weight beside the uniform scheme of that size:
  perplexity on text that nobody has calibrated on, with the interval of the difference.

    python benchmarks/advice.py --only harm --stories 60
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from racing import seconds_of_others
from rich.console import Console
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from stories import load_stories, shared_folder
from tables import Column, Measured, Row, Section, number, show
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import calipers
from calipers.advice.candidates import SOLVER
from calipers.demo import MODEL
from calipers.demo.text import library_pieces
from calipers.kernels import describe
from calipers.steps import QuantizationModifier

SCHEMES = ("W3A16-g32", "W4A16-g96", "NVFP4A16")
OFFERED = ("W3A16-g32", "W4A16-g32", "NVFP4A16", "W5A16-g32", "W6A16-g32", "W8A16-g32")
LARGE_GROUPS = {"stories15M": "W4A16-g96", "demo": "W4A16-g128"}  # as their weights allow
UNIFORM = "W4A16-g32"
BUDGET = "4.5bpw"
LEAST = 0.8


def main() -> int:
    """Run the sections, and print each as soon as it is done."""
    options = parse_arguments()
    console = Console(width=124, highlight=False)
    console.print(f"{describe()}\n")
    with tempfile.TemporaryDirectory() as place:
        options.place = Path(place)
        for name in options.only or SECTIONS:
            started, used = time.perf_counter(), seconds_of_others()
            rows = list(SECTIONS[name].measure(options))
            share = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
            show(console, SECTIONS[name], Measured(rows, share))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Predictions and choices, held against the truth.")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--stories", type=int, default=100, help="that modules are judged on")
    parser.add_argument("--seen", type=Path, help="a file of measurements of stories15M, if made")
    return parser.parse_args()


def stories_model() -> Path:
    """Return the folder of stories15M."""
    return shared_folder() / "models" / "stories15M"


def stories_text(name: str) -> str:
    """Return the file of stories."""
    return str(shared_folder() / "text" / f"stories-{name}.jsonl")


def measured_stories(options: argparse.Namespace) -> calipers.Measurements:
    """Measure stories15M, or read what was measured."""
    if options.seen is not None:
        return calipers.Measurements.load(options.seen)
    return calipers.measure(
        stories_model(),
        stories_text("calibration"),
        collect="sensitivity",
        num_samples=128,
        max_seq_length=256,
        progress=False,
    )


# One module at a time


def measure_harm(options: argparse.Namespace) -> Iterator[Row]:
    """Quantize one module at a time, and judge the model each time."""
    seen = measured_stories(options)
    advice = calipers.advise(stories_model(), seen, SCHEMES, progress=False)
    judged = Judged(load_stories("evaluation")[: options.stories])
    everything: list[tuple[float, float, float]] = []
    for scheme in SCHEMES:
        found = [each for each in advice.predictions if each.scheme == scheme]
        weights = quantized_weights(scheme, seen, options.place / scheme)
        harms = [judged.harm(each.module, weights[each.module]) for each in found]
        predicted = [each.loss or 0.0 for each in found]
        pairs = [(p, *harm) for p, harm in zip(predicted, harms, strict=True)]
        everything += pairs
        yield correlations(scheme, pairs, [each.error for each in found])
    yield correlations("all together", everything)


def quantized_weights(scheme: str, seen: calipers.Measurements, place: Path) -> dict[str, Tensor]:
    """Return what a scheme makes of all weights, as transformers reads it from a checkpoint."""
    name, _, group = scheme.partition("-g")
    size: dict[str, Any] = {"group_size": int(group)} if group else {}
    calipers.quantize(stories_model(), uniform(name), seen, place, progress=False, **size)
    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(place, quantization_config=config)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: module.weight.detach().float() for name, module in linear.items()}


def uniform(scheme: str) -> Any:
    """Return a recipe with one scheme for all modules but the output layer."""
    given: dict[str, Any] = {"ignore": ["lm_head"], "weight_observer": dict(SOLVER)}
    return QuantizationModifier(scheme=scheme, **given)


def correlations(
    scheme: str, pairs: list[tuple[float, float, float]], errors: list[float] | None = None
) -> Row:
    """Compare predictions with what happened."""
    predicted, losses, divergences = zip(*pairs, strict=True)
    ratios = sorted(kl / p for p, _, kl in pairs if p > 0)
    return {
        "scheme": scheme,
        "modules": len(pairs),
        "with_kl": spearmanr(predicted, divergences).statistic,
        "with_loss": spearmanr(predicted, losses).statistic,
        "limit": spearmanr(divergences, losses).statistic,
        "plain": None if errors is None else spearmanr(errors, divergences).statistic,
        "ratio": ratios[len(ratios) // 2],
        "goal": "✓" if spearmanr(predicted, divergences).statistic >= LEAST else "✗",
    }


class Judged:
    """A model whose modules get other weights, one at a time."""

    def __init__(self, stories: list[Tensor]) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(stories_model(), dtype=torch.float32)
        self.model = model.eval()
        self.stories = stories
        self.base = [self._predictions(story).half() for story in stories]

    def harm(self, name: str, weight: Tensor) -> tuple[float, float]:
        """Return what a module with another weight adds to the loss, and the divergence."""
        module = self.model.get_submodule(name)
        before, module.weight.data = module.weight.data, weight
        try:
            sums = [self._compared(*each) for each in zip(self.stories, self.base, strict=True)]
        finally:
            module.weight.data = before
        loss, divergence = map(math.fsum, zip(*sums, strict=True))
        count = sum(story.shape[1] - 1 for story in self.stories)
        return loss / count, divergence / count

    @torch.no_grad()
    def _predictions(self, story: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=story).logits[0, :-1].log_softmax(-1)
        return found

    def _compared(self, story: Tensor, base: Tensor) -> tuple[float, float]:
        old = base.float()
        lost = old - self._predictions(story)
        gain = lost.gather(-1, story[0, 1:, None])
        return float(gain.sum()), float(lost.mul_(old.exp_()).sum())


# Budgets


def measure_budget(options: argparse.Namespace) -> Iterator[Row]:
    """Compare advised recipes with uniform ones."""
    yield compared("stories15M", stories_model(), measured_stories(options), options.place)
    seen = calipers.measure(
        MODEL, library_pieces("calibration"), collect="sensitivity", packing=True, progress=False
    )
    yield compared("demo", MODEL, seen, options.place)


def compared(name: str, model: Path, seen: calipers.Measurements, place: Path) -> Row:
    """Quantize as advised and uniformly, and evaluate both."""
    offered = (*OFFERED, LARGE_GROUPS[name])
    advice = calipers.advise(model, seen, offered, BUDGET, progress=False)
    assert advice.total is not None
    folders = {"advised": place / f"{name}-advised", "uniform": place / f"{name}-uniform"}
    calipers.quantize(model, advice.recipe, seen, folders["advised"], progress=False)
    plain = uniform("W4A16")
    calipers.quantize(model, plain, seen, folders["uniform"], group_size=32, progress=False)
    text: Any = stories_text("evaluation")
    cut: dict[str, Any] = {"max_seq_length": 256, "num_samples": 300}
    if name == "demo":
        text, cut = library_pieces("evaluation"), {"packing": True, "num_samples": 2000}
    judged = calipers.evaluate(model, folders, text, progress=False, **cut)
    found = judged.difference("advised", "uniform")
    changes = {key: each.change.value for key, each in judged.checkpoints.items()}
    return {
        "model": name,
        "bits": advice.total.bits,
        "predicted": advice.total.harm,
        "uniform_bits": advice.uniform[UNIFORM].bits,
        "uniform_predicted": advice.uniform[UNIFORM].harm,
        "increase": changes["advised"],
        "uniform_increase": changes["uniform"],
        "difference": f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]",
        "goal": "✓" if found.high < 0 else "✗",
    }


SECTIONS = {
    "harm": Section(
        measure_harm,
        "One module of stories15M quantized at a time: rank correlation of predicted and real harm",
        (
            Column("scheme", "scheme"),
            Column("modules", "modules"),
            Column("with KL", "with_kl", number, "predicted loss and KL(float ‖ quantized)."),
            Column("with loss", "with_loss", number, "predicted loss and the loss that was added."),
            Column("limit", "limit", number, "KL and that loss: what noise leaves of it."),
            Column("by error", "plain", number, "output error, without sensitivity, and KL."),
            Column("KL ÷ predicted", "ratio", number, "the median."),
            Column("goal", "goal", str, f"at least {LEAST} with KL."),
        ),
    ),
    "budget": Section(
        measure_budget,
        f"Advised for {BUDGET} beside uniform {UNIFORM}, same solver",
        (
            Column("model", "model"),
            Column("bits", "bits", number),
            Column("predicted", "predicted", number, "nats that the loss gains."),
            Column("uniform bits", "uniform_bits", number),
            Column("predicted", "uniform_predicted", number),
            Column("ppl +", "increase", number, "increase of perplexity."),
            Column("uniform ppl +", "uniform_increase", number),
            Column("difference", "difference", str, "95 % interval, paired."),
            Column("goal", "goal"),
        ),
    ),
}


if __name__ == "__main__":
    raise SystemExit(main())
