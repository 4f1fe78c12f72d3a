"""The modifier that quantizes: which modules of a model, and what their parameters are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import KV_CACHE_TARGETS
from compressed_tensors.utils.match import match_named_modules, match_targets

from calipers.errors import CalipersWarning, Option, RecipeError, listing, unfit
from calipers.numerics.library_versions import is_aimed_at, is_cached_attention_module
from calipers.planning.checks import check_patterns, report, what_there_is
from calipers.planning.plan import StepPlan
from calipers.planning.specs import (
    SCHEME_FIELDS,
    ModuleKind,
    ModuleSpec,
    TensorSpec,
    tensor_specs,
)
from calipers.steps.choices import ARGS_FIELDS
from calipers.steps.layer import Changes, Layer
from calipers.steps.quantization_settings import QuantizationSettings
from calipers.steps.solving import solve_activations, solve_weights


class QuantizationModifier(QuantizationSettings):
    """Quantizes the targets of a model that are not ignored.

    What is quantized how is said once: by ``scheme`` (a preset's name, presets with their targets,
    or an explicit scheme), by ``config_groups``, or by ``weights``, ``input_activations`` and
    ``output_activations``; and beside it, or alone, ``kv_cache_scheme``.

    :param targets: names of modules, names of classes, or ``re:`` patterns
    :param ignore: the same, for what stays as it is
    :param unmatched: what happens if one of them matches nothing

    >>> modifier = QuantizationModifier(scheme="W4A16", ignore="lm_head", weight_observer="mse")
    >>> modifier.schemes["group_0"].weights.observer
    'mse'
    """

    method: ClassVar[str] = "rtn"

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:
        """Say which modules of a model this modifier quantizes, and how."""
        by_target = {t: scheme for scheme in self.schemes.values() for t in scheme.targets}
        check_patterns(model, f"{self.label()}.targets", by_target, self.unmatched)
        check_patterns(model, f"{self.label()}.ignore", self.ignore, self.unmatched)
        self._warn_of_idle_observers(by_target.values())
        matched = dict(match_named_modules(model, by_target, self.ignore))
        resolved = _Schemes(step, self.orders_columns)
        planned = []
        for name, module in matched.items():
            scheme = by_target[match_targets(name, module, by_target)[0]]
            kind = _kind(model, name, module, scheme.targets)
            if kind is not None and _quantizes(scheme):
                planned.append(resolved.spec(name, module, scheme, kind))
        self._check_useful(model, by_target, matched)
        return StepPlan((*planned, *self._cached(model, resolved)))

    def solve(self, layer: Layer) -> Changes:
        """Find the parameters of activations and weights."""
        return Changes(qparams={**solve_activations(layer), **solve_weights(layer)})

    def _warn_of_idle_observers(self, schemes: Iterable[QuantizationScheme]) -> None:
        """Tell of a chosen observer that nothing will use."""
        used: set[str] = set()
        for scheme in schemes:
            for base_name, field in SCHEME_FIELDS.items():
                args = getattr(scheme, field)
                if args is not None and args.dynamic is not True:
                    used |= {key for key, _ in self._choices(base_name)}
        chosen = {key for base_name in SCHEME_FIELDS for key, _ in self._choices(base_name)}
        for key in sorted(chosen - used):
            told = CalipersWarning(
                "has no effect: what it would watch is not quantized, or is dynamic (its scale is "
                "found while the model runs)",
                subject=Option(key, owner=self.label()),
            )
            warnings.warn(told, stacklevel=3)

    def _check_useful(
        self,
        model: torch.nn.Module,
        targets: Iterable[str],
        matched: Mapping[str, torch.nn.Module],
    ) -> None:
        """Refuse targets that match, but nothing that can be quantized."""
        for target in targets:
            found = {n: m for n, m in matched.items() if match_targets(n, m, [target])}
            if found and not any(_kind(model, n, m, [target]) for n, m in found.items()):
                classes = sorted({type(module).__name__ for module in found.values()})
                report(
                    f"'{target}' matches only {listing(classes)}",
                    self.unmatched,
                    where=f"{self.label()}.targets",
                    hint="Linear and Embedding modules can be quantized, and attention modules "
                    "that a pattern matches without their parts",
                )

    def _cached(self, model: torch.nn.Module, resolved: _Schemes) -> Iterator[ModuleSpec]:
        if self.kv_cache_scheme is None:
            return
        scheme = QuantizationScheme(
            targets=list(KV_CACHE_TARGETS),
            input_activations=self.kv_cache_scheme.model_copy(deep=True),
        )
        found = {n: m for n, m in model.named_modules() if is_cached_attention_module(m)}
        if not found:
            raise RecipeError(
                f"{type(model).__name__} has no attention module with a cache",
                where=f"{self.label()}.kv_cache_scheme",
                hint=what_there_is(model),
            )
        for name, module in found.items():
            yield resolved.spec(name, module, scheme, "kv_cache")


class _Schemes:
    """Schemes as specs, each resolved once for all modules that have it."""

    def __init__(self, step: str, orders_columns: bool) -> None:
        self._step, self._orders_columns = step, orders_columns
        self._resolved: dict[tuple[int, ModuleKind], tuple[TensorSpec, ...]] = {}

    def spec(
        self, name: str, module: torch.nn.Module, scheme: QuantizationScheme, kind: ModuleKind
    ) -> ModuleSpec:
        """Return the spec of a module; a scheme that does not suit it is refused by its name."""
        key = (id(scheme), kind)
        if key not in self._resolved:
            _check_scheme(name, kind, scheme, self._orders_columns)
            self._resolved[key] = tensor_specs(scheme, kind, self._step, name)
        columns = getattr(module, "in_features", None) if kind == "linear" else None
        return ModuleSpec(name, scheme, self._resolved[key], kind, columns)


def _check_scheme(
    name: str, kind: ModuleKind, scheme: QuantizationScheme, orders_columns: bool
) -> None:
    if kind == "attention" and (scheme.weights or scheme.output_activations):
        raise RecipeError(
            f"'{name}' is an attention module: a scheme for it has input_activations only, "
            "which quantize q, k and v. To quantize weights, target its Linear modules."
        )
    is_ordered = scheme.weights is not None and scheme.weights.actorder is not None
    if is_ordered and not orders_columns:
        problem = "'actorder' is for GPTQ, which orders columns; observers do not"
        raise unfit(name, "weight", problem, hint="Leave it out")


def _kind(
    model: torch.nn.Module, name: str, module: torch.nn.Module, targets: list[str]
) -> ModuleKind | None:
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        return "linear"
    if is_cached_attention_module(module) and is_aimed_at(model, targets, name, module):
        return "attention"
    return None


def _quantizes(scheme: QuantizationScheme) -> bool:
    return any(getattr(scheme, field) is not None for field in ARGS_FIELDS)
