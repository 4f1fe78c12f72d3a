"""How each library quantizes a whole model, and by which of its methods."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationArgs
from contenders import AUTO_ROUND, OURS, PEER, is_int, is_nvfp4
from llmcompressor.entrypoints.oneshot import oneshot as peer_oneshot
from llmcompressor.modifiers.gptq import GPTQModifier as PeerGPTQ
from llmcompressor.modifiers.quantization import QuantizationModifier as PeerModifier
from llmcompressor.modifiers.transform.awq import AWQModifier as PeerAWQ
from llmcompressor.pipelines.cache import IntermediatesCache
from loguru import logger
from running import as_loader
from torch import Tensor
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import calipers

GPTQ, AWQ, ROUNDING = "GPTQModifier", "AWQModifier", "AutoRound"
ROW = 192  # tokens; the stories of a calibration make about as many rows as there are stories

# The peer's GPTQ writes on this level, which is not there when its log is turned off.
logger.level("METRIC", no=38)
logger.remove()
disable_progress_bar()
set_verbosity_error()


@dataclass(frozen=True)
class Method:
    """How weights are quantized.

    :param key: what the command line calls it
    :param step: what quantizes the weights
    :param observer: of the weights; None: the one that the step takes by itself
    :param options: of the step
    :param before: steps that come first, with their options
    :param keywords: of ``calipers.oneshot``
    :param is_usual: whether it runs unless others are named
    """

    key: str
    library: str
    step: str
    observer: str | None = None
    observer_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keywords: Mapping[str, Any] = field(default_factory=dict)
    suits: Callable[[QuantizationArgs], bool] = lambda _: True
    is_usual: bool = True

    @property
    def is_signed(self) -> bool:
        """Whether scales may be negative, beside others whose scales may not."""
        return bool(self.observer_options.get("signed_scale"))

    def run(self, model: Any, args: QuantizationArgs, data: Sequence[Tensor], words: Any) -> Any:
        """Quantize a model, and return it."""
        if self.library == AUTO_ROUND:
            return run_auto_round(model, args, data, words, self.options)
        weights = {**args.model_dump(exclude_unset=True), "observer": self.observer}
        if self.observer_options:
            weights["observer_kwargs"] = dict(self.observer_options)
        group = {"targets": ["Linear"], "weights": weights}
        recipe = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], **self.options}
        if self.library == PEER:
            return run_peer(model, self.step, recipe, data, words)
        steps = {**self.before, self.step: recipe}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", calipers.CalipersWarning)
            return calipers.oneshot(
                model,
                {"modifiers": {name: dict(options) for name, options in steps.items()}},
                as_loader(data),
                tokenizer=words,
                progress=False,
                **self.keywords,
            ).model

    def __str__(self) -> str:
        """Write the method as a table can hold it."""
        told = {**self.observer_options, **self.options, **self.keywords}
        options = ", ".join(f"{key}={value}" for key, value in told.items())
        steps = (*self.before, self.step)
        return " ".join(filter(None, (self.library, *steps, self.observer, options)))

    def identity(self) -> str:
        """Return what changes when the method may give something else than before."""
        code = digest() if self.library == OURS else version(PACKAGES[self.library])
        return f"{self} {code}"


PACKAGES = {PEER: "llmcompressor", AUTO_ROUND: "auto-round"}


@cache
def digest() -> str:
    """Return a digest of all code of Calipers: its version says too little while it is written."""
    found = hashlib.sha256()
    for path in sorted(Path(calipers.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".so", ".json", ".yaml"):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def run_peer(
    model: Any, step: str, recipe: dict[str, Any], data: Sequence[Tensor], words: Any
) -> Any:
    """Quantize a model with the peer's method of this name."""
    steps = [PeerGPTQ(**recipe)] if step == GPTQ else [PeerAWQ(), PeerModifier(**recipe)]
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


def run_auto_round(
    model: Any,
    args: QuantizationArgs,
    data: Sequence[Tensor],
    words: Any,
    options: Mapping[str, Any],
) -> Any:
    """Quantize a model with AutoRound itself, at its defaults but for options.

    llm-compressor's modifier runs the same code layer by layer, but pads samples of unlike length
    and compiles with settings of its own. Symmetric integers have scales of either sign here: the
    value that is largest in magnitude becomes the lowest code.
    """
    from auto_round import AutoRound
    from auto_round.schemes import QuantizationScheme

    logging.getLogger("autoround").setLevel(logging.ERROR)
    rows, threads = packed(data), torch.get_num_threads()
    # Its preset NVFP4 would quantize activations too, even if it is told not to.
    scheme = QuantizationScheme(
        bits=args.num_bits,
        group_size=args.group_size,
        data_type="int" if is_int(args) else "nv_fp" if is_nvfp4(args) else "mx_fp",
        sym=args.symmetric,
        act_bits=16,
    )
    told = {"seqlen": ROW, "nsamples": len(rows), "device_map": "cpu", **options}
    result = deepcopy(model)
    tuned, _ = AutoRound(model, scheme=scheme, tokenizer=words, dataset=rows, **told).quantize()
    found = tuned.state_dict()
    torch.set_num_threads(threads)
    # Layers that it has compiled are compiled again for every length of a sample.
    result.load_state_dict({name: found[name] for name in result.state_dict()})
    return result


def packed(data: Sequence[Tensor]) -> list[Tensor]:
    """Join all samples, and cut them to rows of equal length, which AutoRound wants."""
    tokens = torch.cat([sample.flatten() for sample in data])
    return list(tokens[: len(tokens) // ROW * ROW].view(-1, 1, ROW))


SIGNED = {"importance": "hessian", "signed_scale": True}
DAMPED = {"dampening_frac": 0.2}
METHODS = (
    Method("autoround", AUTO_ROUND, ROUNDING),
    Method(
        "autoround-ordinary",
        AUTO_ROUND,
        ROUNDING,
        # Compiled, it cannot work out the gradients of these scales.
        options={"data_type": "int_sym_gptq", "enable_torch_compile": False},
        suits=is_int,
        is_usual=False,
    ),
    Method("peer-gptq", PEER, GPTQ, "memoryless_mse"),
    Method("peer-gptq-imatrix", PEER, GPTQ, "imatrix_mse"),
    # It tries 20 scalings of each layer; with a search for scales in each of them it takes hours.
    Method("peer-awq", PEER, AWQ, "memoryless_minmax"),
    Method("peer-gptq-expanded", PEER, GPTQ, "nvfp4_expanded_mse", suits=is_nvfp4),
    Method("peer-gptq-expanded-imatrix", PEER, GPTQ, "nvfp4_expanded_imatrix", suits=is_nvfp4),
    Method("gptq", OURS, GPTQ),
    Method("gptq-signed", OURS, GPTQ, "optimal", SIGNED, suits=is_int),
    Method("gptq-damped", OURS, GPTQ, options=DAMPED),
    Method("gptq-damped-signed", OURS, GPTQ, "optimal", SIGNED, DAMPED, suits=is_int),
    *(
        Method(f"gptq-{name}", OURS, GPTQ, options={"error_propagation": name}, is_usual=False)
        for name in ("quantized", "float")
    ),
)
KEYS = tuple(method.key for method in METHODS)
