"""Which schemes are compared, and which observers of Calipers and llm-compressor take part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from calipers import Observer

try:
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from llmcompressor.observers import Observer as Peer
except ImportError:
    sys.exit("llm-compressor is not installed here: `make bench-accuracy` sets it up.")

OURS, PEER, AUTO_ROUND = "calipers", "llm-compressor", "auto-round"
LIBRARIES: dict[str, Any] = {OURS: Observer, PEER: Peer}


class Scheme(NamedTuple):
    """What is quantized, and how."""

    weights: QuantizationArgs | None = None
    inputs: QuantizationArgs | None = None
    cache: QuantizationArgs | None = None

    @property
    def activations(self) -> QuantizationArgs | None:
        """What is observed while stories run."""
        return self.inputs or self.cache


@dataclass(frozen=True, eq=False)
class Contender:
    """An observer with its options, and for which arguments it is meant."""

    library: str
    observer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    suits: Callable[[QuantizationArgs], bool] = lambda _: True
    meets_activations: bool = True  # is also tried together with each observer of activations

    @property
    def is_registered(self) -> bool:
        """Whether this version of its library has it."""
        names = LIBRARIES[self.library].registered_names()
        return self.observer in {name.replace("-", "_") for name in names}

    def build(self, base_name: str, args: QuantizationArgs) -> Any:
        """Build the observer; the peer changes its arguments, so each has its own."""
        own = args.model_copy(deep=True)
        return LIBRARIES[self.library].load_from_registry(
            self.observer, base_name=base_name, args=own, **self.options
        )

    def __str__(self) -> str:
        """Write the observer as one would call it."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.observer}({options})" if options else self.observer


def preset_weights(name: str, **changes: Any) -> QuantizationArgs:
    """Return how a preset quantizes weights, changed a little."""
    weights: QuantizationArgs = preset_name_to_scheme(name, ["Linear"]).weights
    return QuantizationArgs(**{**weights.model_dump(), **changes})


def preset(name: str) -> Scheme:
    """Return a preset as it is."""
    found = preset_name_to_scheme(name, ["Linear"])
    return Scheme(found.weights, found.input_activations)


def is_nvfp4(args: QuantizationArgs) -> bool:
    """Whether local scales stand under a global one."""
    return bool(args.strategy == "tensor_group")


def is_counted(args: QuantizationArgs) -> bool:
    """Whether values are counted: per tensor or per head."""
    return args.strategy in ("tensor", "attn_head")


def is_int(args: QuantizationArgs) -> bool:
    """Whether codes are integers."""
    return bool(args.type == "int")


SCHEMES = {
    "W4A16-g32": Scheme(preset_weights("W4A16", group_size=32)),
    "W4A16-g96": Scheme(preset_weights("W4A16", group_size=96)),
    "W3A16-g32": Scheme(preset_weights("W3A16", group_size=32)),
    "W2A16-g32": Scheme(preset_weights("W2A16", group_size=32)),
    "W8A16-channel": Scheme(preset_weights("W8A8")),
    "FP8-channel": Scheme(preset_weights("FP8_DYNAMIC")),
    "NVFP4A16": preset("NVFP4A16"),
    "MXFP4A16": preset("MXFP4A16"),
    "W8A8-static": Scheme(
        preset_weights("W8A8"), QuantizationArgs(num_bits=8, strategy="tensor", symmetric=True)
    ),
    "FP8-static": preset("FP8"),
    "NVFP4": preset("NVFP4"),
    "FP8-KV-cache": Scheme(
        cache=QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
    ),
}

WEIGHT_CONTENDERS = (
    *(
        Contender(
            library,
            observer,
            meets_activations=library == PEER or observer == "memoryless_minmax",
        )
        for library in (PEER, OURS)
        for observer in ("memoryless_minmax", "memoryless_mse", "imatrix_mse")
    ),
    *(
        Contender(library, observer, suits=is_nvfp4)
        for library, observer in (
            (PEER, "nvfp4_expanded_mse"),
            (PEER, "nvfp4_expanded_imatrix"),
            (OURS, "nvfp4_expanded_mse"),
        )
    ),
    *(
        Contender(
            OURS,
            "optimal",
            {"importance": importance},
            meets_activations=importance == "hessian",
        )
        for importance in ("none", "imatrix", "hessian")
    ),
    *(
        Contender(
            OURS,
            "optimal",
            {"importance": importance, "signed_scale": True},
            suits=is_int,
            meets_activations=False,
        )
        for importance in ("imatrix", "hessian")
    ),
)

ACTIVATION_CONTENDERS = (
    *(
        Contender(library, observer)
        for library in (PEER, OURS)
        for observer in ("static_minmax", "minmax", "mse")
    ),
    *(
        Contender(OURS, observer, suits=is_counted)
        for observer in ("histogram_mse", "percentile", "entropy")
    ),
)
