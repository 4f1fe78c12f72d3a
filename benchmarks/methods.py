"""Perplexity of whole models quantized by GPTQ and AWQ of llm-compressor and by GPTQ of Calipers.

Same schemes, same calibration data in the same order, same run. Models are bfloat16, as their
checkpoints are, and are judged in float32. An increase is held against the best of the peer, by
whichever method and observer.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationArgs
from contenders import OURS, PEER, SCHEMES, is_int, is_nvfp4
from llmcompressor.entrypoints.oneshot import oneshot as peer_oneshot
from llmcompressor.modifiers.gptq import GPTQModifier as PeerGPTQ
from llmcompressor.modifiers.quantization import QuantizationModifier as PeerModifier
from llmcompressor.modifiers.transform.awq import AWQModifier as PeerAWQ
from llmcompressor.pipelines.cache import IntermediatesCache
from loguru import logger
from rich.console import Console
from running import as_loader
from stories import let_pass, load_model, load_stories, load_tokenizer, perplexity
from tables import Column, Row, mark, table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import calipers
from calipers.demo import MODEL
from calipers.demo.text import Part, library_pieces
from calipers.steps import GPTQModifier

CALIBRATION = 128  # samples
GPTQ, AWQ = "GPTQ", "AWQ"
ALLOWED = {"W4A16-g96": 0.70, "W4A16-g32": 0.70, "W3A16-g32": 0.75, "NVFP4A16": 0.78}
ALLOWED_SIGNED = {"W4A16-g96": 0.65, "W4A16-g32": 0.65, "W3A16-g32": 0.60}


class Subject(NamedTuple):
    """A model, and the samples that it is calibrated and judged on."""

    name: str
    load: Callable[[], Any]
    tokenizer: Callable[[], Any]
    calibration: Callable[[], list[Tensor]]
    evaluation: Callable[[], list[Tensor]]
    schemes: tuple[str, ...]

    def halved(self) -> Subject:
        """Return the same with every other sample of the calibration."""
        half = f"{self.name}, half of the data"
        return self._replace(name=half, calibration=lambda: self.calibration()[::2])


@dataclass(frozen=True)
class Method:
    """How weights are quantized.

    :param observer: of the weights; None: the one that the method takes by itself
    :param options: of the modifier
    """

    library: str
    name: str
    observer: str | None = None
    observer_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    suits: Callable[[QuantizationArgs], bool] = lambda _: True

    @property
    def is_signed(self) -> bool:
        """Whether scales may be negative."""
        return bool(self.observer_options.get("signed_scale"))

    def run(self, model: Any, args: QuantizationArgs, data: Sequence[Tensor], words: Any) -> Any:
        """Quantize a model, and return it."""
        weights = {**args.model_dump(exclude_unset=True), "observer": self.observer}
        if self.observer_options:
            weights["observer_kwargs"] = dict(self.observer_options)
        group = {"targets": ["Linear"], "weights": weights}
        recipe = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], **self.options}
        if self.library == PEER:
            return run_peer(model, self.name, recipe, data, words)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", calipers.CalipersWarning)
            step, loader = GPTQModifier(**recipe), as_loader(data)
            return calipers.oneshot(model, step, loader, tokenizer=words, progress=False).model

    def __str__(self) -> str:
        """Write the method as a table can hold it."""
        told = {**self.observer_options, **self.options}
        options = ", ".join(f"{key}={value}" for key, value in told.items())
        return " ".join(filter(None, (self.name, self.observer, options)))


def run_peer(
    model: Any, name: str, recipe: dict[str, Any], data: Sequence[Tensor], words: Any
) -> Any:
    """Quantize a model with the peer's method of this name."""
    steps = [PeerGPTQ(**recipe)] if name == GPTQ else [PeerAWQ(), PeerModifier(**recipe)]
    loader = as_loader(data)
    # Its AWQ pins memory, which takes an accelerator.
    with patch.object(IntermediatesCache, "pin_memory", lambda *_: None):
        return peer_oneshot(
            model=model,
            recipe=steps,
            dataset=loader,
            tokenizer=words,
            num_calibration_samples=len(loader),
            pipeline="sequential",
        )


HESSIAN = {"importance": "hessian"}
METHODS = (
    Method(PEER, GPTQ, "memoryless_mse"),
    Method(PEER, GPTQ, "imatrix_mse"),
    # It tries 20 scalings of each layer; with a search for scales in each of them it takes hours.
    Method(PEER, AWQ, "memoryless_minmax"),
    Method(PEER, GPTQ, "nvfp4_expanded_mse", suits=is_nvfp4),
    Method(PEER, GPTQ, "nvfp4_expanded_imatrix", suits=is_nvfp4),
    Method(OURS, GPTQ),
    Method(OURS, GPTQ, "optimal", {**HESSIAN, "signed_scale": True}, suits=is_int),
    Method(OURS, GPTQ, options={"error_propagation": "quantized"}),
    Method(OURS, GPTQ, options={"error_propagation": "float"}),
)


def spaced(samples: list[Tensor], count: int) -> list[Tensor]:
    """Take so many, evenly from first to last."""
    return [samples[index * len(samples) // count] for index in range(count)]


@cache
def stories(part: str) -> list[Tensor]:
    """Return the tokens of each story."""
    return load_stories(part)


def library(part: Part) -> list[Tensor]:
    """Return the tokens of each piece of Python's library that fills the context of the model."""
    tokenizer, limit = AutoTokenizer.from_pretrained(MODEL), 256
    tokens = (tokenizer(text)["input_ids"][:limit] for text in library_pieces(part))
    return [torch.tensor([each]) for each in tokens if len(each) == limit]


STORIES = Subject(
    "stories15M",
    load_model,
    load_tokenizer,
    lambda: spaced(stories("calibration"), CALIBRATION),
    lambda: stories("evaluation"),
    tuple(ALLOWED),
)
DEMO = Subject(
    "the demo model",
    lambda: AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16),
    lambda: AutoTokenizer.from_pretrained(MODEL),
    lambda: spaced(library("calibration"), CALIBRATION),
    lambda: spaced(library("evaluation"), 256),
    tuple(name for name in ALLOWED if name != "W4A16-g96"),  # its layers are 128 wide
)
# The peer's GPTQ writes on this level, which is not there when its log is turned off.
logger.level("METRIC", no=38)
logger.remove()

SECTIONS = {"methods": STORIES, "methods-half": STORIES.halved(), "methods-demo": DEMO}


def measure_methods(console: Console, subject: Subject) -> list[Row]:
    """Judge every method on a subject, and print each scheme as soon as it is done."""
    results = []
    for scheme in subject.schemes:
        started, rows = time.perf_counter(), []
        for row in judged(subject, scheme):
            rows.append(row)
            told = f"  {row['library']} {row['method']} {row['increase']:+.4f}"
            console.print(told, style="dim", markup=False)
        compare(rows, scheme)
        console.print(f"{subject.name}, {scheme}: float {rows[0]['base']:.4f}", style="bold")
        console.print(table(COLUMNS, rows))
        console.print(f"Took {time.perf_counter() - started:.0f} s.\n")
        results += rows
    return results


def judged(subject: Subject, scheme: str) -> Iterator[Row]:
    """Try every method that suits a scheme."""
    args, data, judges = SCHEMES[scheme].weights, subject.calibration(), subject.evaluation()
    assert args is not None
    base = perplexity(subject.load().float(), judges, let_pass)
    for method in METHODS:
        if not method.suits(args):
            continue
        started = time.perf_counter()
        model = method.run(subject.load(), args, data, subject.tokenizer())
        seconds = time.perf_counter() - started
        found = perplexity(model.float(), judges, let_pass)
        yield {
            "subject": subject.name,
            "scheme": scheme,
            "library": method.library,
            "method": str(method),
            "is_signed": method.is_signed,
            "is_default": method.library == OURS and not method.options,
            "base": base,
            "perplexity": found,
            "increase": found - base,
            "seconds": seconds,
        }


def compare(rows: list[Row], scheme: str) -> None:
    """Hold each increase against the best GPTQ of the peer; ours as they come against the goal."""
    best = min(row["increase"] for row in rows if row["library"] == PEER)
    for row in rows:
        row["ratio"] = row["increase"] / best
        allowed = (ALLOWED_SIGNED if row["is_signed"] else ALLOWED)[scheme]
        if row["is_default"]:
            row["allowed"], row["reached"] = allowed, row["ratio"] <= allowed


COLUMNS = (
    Column("library", "library"),
    Column("method", "method"),
    Column("perplexity", "perplexity", "{:.4f}".format),
    Column("increase", "increase", "{:+.4f}".format),
    Column("÷ peer's best", "ratio", "{:.3f}".format),
    Column("at most", "allowed", "{:.2f}".format),
    Column("reached", "reached", mark),
    Column("seconds", "seconds", "{:.0f}".format),
)
