"""The model quantized by each contender of a scheme, and what is left of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from contenders import OURS, SCHEMES, WEIGHT_CONTENDERS, Contender, Scheme
from gathering import (
    ImportanceGatherer,
    give_importance,
    importance_key,
    leading_site,
    observe_activations,
)
from llmcompressor.observers.fusion import FusionHandler
from stories import Visit, decoder_linears, let_pass, load_model, perplexity, spread
from tables import Row
from torch import Tensor

from calipers import Observer
from calipers.numerics.qparams import fake_quantize
from calipers.topology.names import FUSED_LAYER_NAMES

ACTIVATION_CALIBRATION, PAIR_EVALUATION = 30, 100  # stories, where activations are quantized

QParams = Mapping[str, Any]


class Bench:
    """The model, what was gathered about it, and what it was found to be worth."""

    def __init__(
        self, schemes: list[str], calibration: list[Tensor], evaluation: list[Tensor]
    ) -> None:
        self.checkpoint = load_model()
        self.model = deepcopy(self.checkpoint).float()
        self.originals = {k: v.weight for k, v in decoder_linears(self.checkpoint).items()}
        self.stories = evaluation
        self.gathered = ImportanceGatherer(self.model, schemes).gather(self.model, calibration)
        self.activations = observe_activations(
            self.model, spread(calibration, ACTIVATION_CALIBRATION), schemes
        )
        self.found: dict[tuple[Contender, str], dict[str, QParams]] = {}
        self.known: dict[str, float] = {}

    def describe(self, name: str) -> str:
        """Say how a scheme is evaluated."""
        base = f"float {self.float_perplexity(name):.4f} on {len(self.judges(name))} stories"
        if not SCHEMES[name].activations:
            return base
        return f"{base}; activations observed on at most {ACTIVATION_CALIBRATION} others"

    def judges(self, name: str) -> list[Tensor]:
        """Return the stories that a scheme is evaluated on."""
        return spread(self.stories, PAIR_EVALUATION) if SCHEMES[name].activations else self.stories

    def float_perplexity(self, name: str) -> float:
        """Return the perplexity of the model as it is."""
        return self.perplexity({k: v.float() for k, v in self.originals.items()}, {}, name)

    def measure(self, name: str) -> Iterator[Row]:
        """Try every contender of a scheme."""
        scheme, base = SCHEMES[name], self.float_perplexity(name)
        for weight_contender, weights in self.quantized_weights(scheme):
            for contender, qparams in self.found_activations(name, weight_contender):
                found = self.perplexity(weights, qparams, name)
                tried = [c for c in (weight_contender, contender) if c is not None]
                yield {
                    "library": tried[0].library,
                    "weights": str(weight_contender or "–"),
                    "activations": str(contender or "–"),
                    "perplexity": found,
                    "increase": found - base,
                }

    def quantized_weights(
        self, scheme: Scheme
    ) -> Iterator[tuple[Contender | None, dict[str, Tensor]]]:
        """Quantize the weights with each contender, or leave them if the scheme does."""
        if scheme.weights is None:
            yield None, {name: weight.float() for name, weight in self.originals.items()}
            return
        for contender in WEIGHT_CONTENDERS:
            if not contender.is_registered or not contender.suits(scheme.weights):
                continue
            if scheme.activations is None or contender.meets_activations:
                yield contender, self.quantize_weights(contender, scheme.weights)

    def found_activations(
        self, name: str, weights: Contender | None
    ) -> Iterator[tuple[Contender | None, dict[str, QParams]]]:
        """Return what each observer of activations found that is of the library of the weights."""
        if SCHEMES[name].activations is None:
            yield None, {}
        for (scheme, contender), qparams in self.activations.items():
            if scheme == name and (weights is None or weights.library == contender.library):
                yield contender, qparams

    def quantize_weights(self, contender: Contender, args: QuantizationArgs) -> dict[str, Tensor]:
        """Observe all weights unless that was done, and return what is left of them."""
        key = contender, str(args)
        if key not in self.found:
            self.found[key] = self.observe_weights(contender, args)
        return {
            name: dequantized(self.originals[name].float(), qparams, args)
            for name, qparams in self.found[key].items()
        }

    def observe_weights(self, contender: Contender, args: QuantizationArgs) -> dict[str, QParams]:
        """Give the observers what they need, and return what they find."""
        observers = {name: contender.build("weight", args) for name in self.originals}
        kind = importance_key(contender, args)
        if kind is not None:
            for name, observer in observers.items():
                sums = self.gathered[kind, leading_site(f"{name}.input")]
                channels = self.originals[name].shape[-1]
                give_importance(observer, contender.library, channels, sums)
        if args.strategy == "tensor_group":
            self.fuse(observers, contender.library)
        for name, observer in observers.items():
            observer(self.originals[name])
        return {name: observer.get_qparams() for name, observer in observers.items()}

    def fuse(self, observers: dict[str, Any], library: str) -> None:
        """Let linears that run as one share a global scale, each library in its way."""
        linears = decoder_linears(self.checkpoint)
        for parent in {name.rpartition(".")[0] for name in observers}:
            for siblings in FUSED_LAYER_NAMES:
                names = [f"{parent}.{sibling}" for sibling in siblings]
                if not observers.keys() >= set(names):
                    continue
                if library == OURS:
                    Observer.fuse(observers[name] for name in names)
                else:
                    FusionHandler.fuse((observers[name], linears[name]) for name in names)

    def perplexity(
        self, weights: dict[str, Tensor], activations: dict[str, QParams], name: str
    ) -> float:
        """Return the perplexity of the quantized model, from memory if it was judged before."""
        stories, key = self.judges(name), digest(weights, activations)
        key += f" {len(stories)} {SCHEMES[name].activations if activations else ''}"
        if key not in self.known:
            for linear_name, linear in decoder_linears(self.model).items():
                linear.weight.data = weights[linear_name]
            visit: Visit = let_pass
            if activations:
                visit = partial(quantize_activation, activations, SCHEMES[name].activations)
            self.known[key] = perplexity(self.model, stories, visit)
        return self.known[key]


def dequantized(value: Tensor, qparams: QParams, args: QuantizationArgs) -> Tensor:
    """Round a float32 tensor to what the parameters, as stored, can express."""
    global_scale = qparams["global_scale"]
    result: Tensor = fake_quantize(
        value,
        qparams["scale"].float(),
        qparams["zero_point"],
        args,
        None if global_scale is None else global_scale.float(),
    )
    return result


def quantize_activation(
    found: Mapping[str, QParams], args: QuantizationArgs, site: str, value: Tensor
) -> Tensor:
    """Quantize what passes a site, if it is to be; local scales are made on the spot."""
    qparams = found.get(leading_site(site))
    if qparams is None:
        return value
    if args.dynamic:
        global_scale = qparams["global_scale"].float()
        scale, zero_point = compute_dynamic_scales_and_zp(value, args, None, global_scale)
        qparams = {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}
    return dequantized(value, qparams, args)


def digest(weights: dict[str, Tensor], activations: dict[str, QParams]) -> str:
    """Return what only equal models have in common."""
    result = hashlib.blake2b()
    used = [v for q in activations.values() for v in q.values() if v is not None]
    for tensor in (*weights.values(), *used):
        result.update(tensor.detach().float().contiguous().numpy().tobytes())
    return result.hexdigest()
