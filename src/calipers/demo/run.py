"""Five checkpoints of the model that ships, each quantized in another way, and what each loses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calipers.demo import MODEL
from calipers.demo.text import library_texts
from calipers.entrypoint import oneshot
from calipers.evaluation import Estimate, Evaluation, evaluate
from calipers.modifiers import QuantizationModifier

CALIBRATION_SAMPLES = 128
EVALUATION_SAMPLES = 256
STATIC_INT8 = {"num_bits": 8, "symmetric": True, "strategy": "tensor"}
CHANNEL_INT8 = {"num_bits": 8, "symmetric": True, "strategy": "channel"}


@dataclass(frozen=True)
class Way:
    """One way to quantize, and the folder its checkpoint goes to."""

    scheme: str
    folder: str
    weights: str
    how: dict[str, Any]
    inputs: str | None = None

    @property
    def observers(self) -> str:
        """Who watches weights and, where they are static, inputs."""
        return self.weights if self.inputs is None else f"{self.weights} + {self.inputs}"

    @property
    def recipe(self) -> QuantizationModifier:
        """What is done to the model."""
        who: dict[str, Any] = {"weight_observer": self.weights, "input_observer": self.inputs}
        return QuantizationModifier(**self.how, **who, ignore=("lm_head",))


STATIC_W8A8 = {"weights": CHANNEL_INT8, "input_activations": STATIC_INT8}
CLASSIC = Way("W4A16", "w4a16-imatrix_mse", "imatrix_mse", {"scheme": "W4A16"})
OPTIMAL = Way("W4A16", "w4a16-optimal", "optimal", {"scheme": "W4A16"})
WAYS = (
    Way("W8A8 static", "w8a8-static", "memoryless_minmax", STATIC_W8A8, "histogram_mse"),
    Way("FP8", "fp8", "memoryless_minmax", {"scheme": "FP8"}, "histogram_mse"),
    CLASSIC,
    OPTIMAL,
    Way("NVFP4A16", "nvfp4a16", "optimal", {"scheme": "NVFP4A16"}),
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
    def gain(self) -> Estimate:
        """By how much the optimal observer's perplexity lies below the best classic one's."""
        return self.evaluation.difference(OPTIMAL.folder, CLASSIC.folder)


def run_demo(
    folder: Path, *, tell: Callable[[str], object] = str, progress: bool | None = None
) -> DemoResult:
    """Quantize the model in every way, load each checkpoint again, and evaluate it.

    :param folder: where the checkpoints go; those of an earlier demo are replaced
    :param tell: is told what happens next; by default nobody is
    :param progress: whether to show progress bars; None: if a person looks at standard error
    """
    calibration = list(library_texts("calibration").values())
    seconds = {}
    for way in WAYS:
        tell(f"quantizing to {way.scheme} with {way.observers}")
        started = time.perf_counter()
        oneshot(
            MODEL,
            way.recipe,
            calibration,
            output_dir=folder / way.folder,
            num_calibration_samples=CALIBRATION_SAMPLES,
            batch_size=8,
            packing=True,
            overwrite=True,
            progress=progress,
        )
        seconds[way.folder] = time.perf_counter() - started
    tell("evaluating on modules that neither the model nor an observer has seen")
    evaluation = evaluate(
        MODEL,
        {way.folder: folder / way.folder for way in WAYS},
        list(library_texts("evaluation").values()),
        num_samples=EVALUATION_SAMPLES,
        batch_size=8,
        packing=True,
        layers=False,
        progress=progress,
    )
    return DemoResult(folder, evaluation, seconds)
