"""Six checkpoints of the model that ships, each quantized in another way, and what each loses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calipers.demo import MODEL
from calipers.demo.text import library_pieces
from calipers.engine.oneshot import oneshot
from calipers.evaluation import Difference, Evaluation, evaluate
from calipers.options import IGNORED_BY_DEFAULT
from calipers.runtime.progress import Progress
from calipers.steps import QuantizationModifier

CALIBRATION_SAMPLES = 128
EVALUATION_SAMPLES = 256


@dataclass(frozen=True)
class Variant:
    """How a model is quantized, and the folder its checkpoint goes to.

    :param weights: the observer of weights; ``options`` are its options
    :param inputs: the observer of inputs, where they are static
    """

    scheme: str
    folder: str
    weights: str
    inputs: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "rtn"

    @property
    def observers(self) -> str:
        """The observers, as ``--observer`` and ``--activation-observer`` name them."""
        weights = ",".join([self.weights, *(f"{k}={v}" for k, v in self.options.items())])
        return weights if self.inputs is None else f"{weights} + {self.inputs}"

    @property
    def recipe(self) -> QuantizationModifier:
        """What is done to the model."""
        weights = {"name": self.weights, **self.options}
        observers: dict[str, Any] = {"weight_observer": weights, "input_observer": self.inputs}
        return QuantizationModifier(scheme=self.scheme, **observers, ignore=IGNORED_BY_DEFAULT)


HESSIAN = {"importance": "hessian"}
CLASSIC = Variant("W4A16", "w4a16-imatrix_mse", "imatrix_mse")
OPTIMAL = Variant("W4A16", "w4a16-optimal", "optimal", options=HESSIAN)
VARIANTS = (
    Variant("W8A8_STATIC", "w8a8-static", "memoryless_minmax", "histogram_mse"),
    Variant("FP8", "fp8", "memoryless_minmax", "histogram_mse"),
    CLASSIC,
    OPTIMAL,
    replace(OPTIMAL, folder="w4a16-gptq", method="gptq"),
    Variant("NVFP4A16", "nvfp4a16", "optimal", options=HESSIAN),
)


@dataclass(frozen=True)
class DemoResult:
    """What the demo found out.

    :param seconds: folder → how long it took from the model in the package to the checkpoint
    """

    folder: Path
    evaluation: Evaluation
    seconds: dict[str, float]

    @property
    def gain(self) -> Difference:
        """By how much the optimal observer's perplexity lies below the best classic one's."""
        return self.evaluation.difference(OPTIMAL.folder, CLASSIC.folder)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "folder": str(self.folder),
            "seconds": self.seconds,
            "gain": self.gain.as_dict(),
            "evaluation": self.evaluation.as_dict(),
        }


def run_demo(
    folder: Path,
    *,
    tell: Callable[[str], object] = str,
    progress: bool | Progress | None = None,
) -> DemoResult:
    """Quantize the model in every way, load each checkpoint again, and evaluate it.

    :param folder: where the checkpoints go; those of an earlier demo are replaced
    :param tell: is told what happens next; by default nobody is
    """
    bars = Progress.of(progress)
    calibration = library_pieces("calibration")
    seconds = {}
    for variant in VARIANTS:
        what = f"quantizing to {variant.scheme} by {variant.method} with {variant.observers}"
        tell(what)
        started = time.perf_counter()
        with bars.waiting(what):
            oneshot(
                MODEL,
                variant.recipe,
                calibration,
                method=variant.method,
                output_dir=folder / variant.folder,
                num_calibration_samples=CALIBRATION_SAMPLES,
                batch_size=8,
                packing=True,
                overwrite=True,
                progress=bars,
            )
        seconds[variant.folder] = time.perf_counter() - started
    tell("evaluating on modules that neither the model nor an observer has seen")
    evaluation = evaluate(
        MODEL,
        {variant.folder: folder / variant.folder for variant in VARIANTS},
        library_pieces("evaluation"),
        num_samples=EVALUATION_SAMPLES,
        batch_size=8,
        packing=True,
        layers=False,
        progress=bars,
    )
    return DemoResult(folder, evaluation, seconds)
