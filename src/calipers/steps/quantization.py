"""The modifier that quantizes: what a recipe says of it, which modules it means, what it finds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import KV_CACHE_TARGETS
from compressed_tensors.utils.match import match_named_modules, match_targets
from pydantic import model_validator
from torch import Tensor
from typing_extensions import Self

from calipers.errors import Option, RecipeError, listing, no_effect, unfit
from calipers.kernels.resources import FreedMemory, in_threads
from calipers.numerics.layout import has_global_scale
from calipers.numerics.library_versions import (
    is_cached_attention_module,
    is_targeted,
    named_observer,
)
from calipers.observers import QParamsDict
from calipers.observers import spec as observers
from calipers.observers.spec import COUNTS, RANGE, Weight, default_observer
from calipers.planning.checks import Unmatched, available_modules, check_patterns, report
from calipers.planning.plan import StepPlan
from calipers.planning.specs import (
    IMPORTANCE,
    SCHEME_FIELDS,
    ModuleKind,
    ModuleSpec,
    TensorSpec,
    args_without_observer,
    has_free_groups,
    regrouped,
    tensor_specs,
    without_observers,
)
from calipers.statistics.base import Statistic
from calipers.steps.base import Changes, Layer, Modifier, Path, Patterns
from calipers.steps.choices import (
    ARGS_FIELDS,
    Args,
    Choice,
    Choices,
    Groups,
    ObserverChoice,
    ObserverChoices,
    SchemeChoice,
    build_scheme,
    preset,
    to_data,
    without_order,
)
from calipers.topology import names as topology

Solved = dict[tuple[str, str], QParamsDict]
Group = tuple[ModuleSpec, ...]

_DEFAULT_TARGETS = ("Linear",)
_SMALL = 1 << 20  # numbers of weights that are solved beside others
_OBSERVER_KEYS = (
    *("weight_observer", "input_observer", "output_observer", "activation_observer", "observer"),
)
_PASSED_OVER = ("bypass_divisibility_checks", "requires_calibration_data")


class QuantizationModifier(Modifier):
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

    targets: Patterns = _DEFAULT_TARGETS
    ignore: Patterns = ()
    scheme: SchemeChoice = None
    config_groups: Groups = None
    weights: Args | None = None
    input_activations: Args | None = None
    output_activations: Args | None = None
    kv_cache_scheme: Args | None = None
    weight_observer: Choice | None = None
    input_observer: Choice | None = None
    output_observer: Choice | None = None
    activation_observer: Choice | None = None
    observer: Choices | None = None
    unmatched: Unmatched = "error"

    @classmethod
    def known_keys(cls, path: Path) -> Iterable[str]:
        """Return the keys allowed at a path inside the modifier."""
        if not path:
            return list(cls.model_fields)
        if path[-1] in (*ARGS_FIELDS, "kv_cache_scheme") and path != ("observer", "weights"):
            return list(QuantizationArgs.model_fields)
        if path[-1] == "observer":
            return list(ObserverChoices.model_fields)
        return list(QuantizationScheme.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _pass_over(cls, given: Any) -> Any:
        """Pass over what llm-compressor writes into every recipe, and the plan knows better."""
        if given.get("bypass_divisibility_checks"):
            raise RecipeError(
                "Groups that do not divide a weight cannot be written. Choose another group_size, "
                "or ignore the modules.",
                path=("bypass_divisibility_checks",),
            )
        return {key: value for key, value in given.items() if key not in _PASSED_OVER}

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        ways = [name for name in ("scheme", "config_groups") if getattr(self, name) is not None]
        explicit = [name for name in ARGS_FIELDS if getattr(self, name) is not None]
        if len(ways) + bool(explicit) > 1:
            names = [*ways, *explicit]
            raise RecipeError(
                f"{self.label()} has {' and '.join(map(repr, names))}: they say the same thing "
                "twice. Keep one way: 'scheme', 'config_groups', or weights and activations.",
                path=(names[1],),
            )
        if not ways and not explicit and self.kv_cache_scheme is None:
            raise RecipeError(
                f"{self.label()} does not say how to quantize. Give it a 'scheme' such as "
                "W4A16, 'config_groups', 'weights' and activations, or a 'kv_cache_scheme'."
            )
        self._check_targets()
        self._check_observers()
        return self

    def _check_targets(self) -> None:
        own = isinstance(self.scheme, dict) or self.config_groups is not None
        own = own or bool(isinstance(self.scheme, QuantizationScheme) and self.scheme.targets)
        if own and self.targets != _DEFAULT_TARGETS:
            raise RecipeError(
                f"{self.label()}.targets has no meaning here: the schemes name their own "
                "targets. Leave it out.",
                path=("targets",),
            )
        for name, scheme in (self.config_groups or {}).items():
            if not scheme.targets:
                raise RecipeError(
                    f"{self.label()}.config_groups.{name} needs the key 'targets'.",
                    path=("config_groups", name),
                )
        if not self.targets:
            raise RecipeError(f"{self.label()}.targets is empty.", path=("targets",))
        seen: dict[str, str] = {}
        for name, scheme in self._unobserved().items():
            for target in scheme.targets:
                if seen.setdefault(target, name) != name:
                    raise RecipeError(
                        f"{self.label()} has two schemes for the target '{target}': "
                        f"{seen[target]} and {name}. Keep one.",
                        path=("scheme" if self.config_groups is None else "config_groups",),
                    )

    def _check_observers(self) -> None:
        for base_name in SCHEME_FIELDS:
            names = [key for key, _ in self._choices(base_name)]
            if len(names) > 1:
                raise RecipeError(
                    f"{self.label()} has {' and '.join(map(repr, names))}: both choose the "
                    f"observer of '{base_name}'. Keep one.",
                    path=(names[1].split(".")[0],),
                )
        if isinstance(self.scheme, str | dict):
            return
        for scheme in self._unobserved().values():
            for base_name, field in SCHEME_FIELDS.items():
                args, choice = getattr(scheme, field), self._choice(base_name)
                if choice and args and named_observer(args) and choice.put_into(args) != args:
                    key = next(key for key, _ in self._choices(base_name))
                    raise RecipeError(
                        f"{self.label()}.{key} chooses '{choice.name}', but '{field}' names the "
                        f"observer '{args.observer}' itself. Keep one.",
                        path=(key.split(".")[0],),
                    )

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:
        """Say which modules of a model this modifier quantizes, and how."""
        by_target = {t: scheme for scheme in self.schemes.values() for t in scheme.targets}
        check_patterns(model, f"{self.label()}.targets", by_target, self.unmatched)
        check_patterns(model, f"{self.label()}.ignore", self.ignore, self.unmatched)
        self._warn_of_idle_observers(by_target.values())
        matched = dict(match_named_modules(model, by_target, self.ignore))
        quantized: list[tuple[str, torch.nn.Module, QuantizationScheme, ModuleKind]] = []
        for name, module in matched.items():
            scheme = by_target[match_targets(name, module, by_target)[0]]
            kind = _kind(model, name, module, scheme.targets)
            if kind is not None and any(getattr(scheme, field) for field in ARGS_FIELDS):
                quantized.append((name, module, scheme, kind))
        self._check_useful(model, by_target, matched)
        if self.kv_cache_scheme is not None:
            scheme = QuantizationScheme(
                targets=list(KV_CACHE_TARGETS),
                input_activations=self.kv_cache_scheme.model_copy(deep=True),
            )
            cached = [(n, m) for n, m in model.named_modules() if is_cached_attention_module(m)]
            if not cached:
                raise RecipeError(
                    f"{type(model).__name__} has no attention module with a cache",
                    where=f"{self.label()}.kv_cache_scheme",
                    hint=available_modules(model),
                )
            quantized += [(name, module, scheme, "kv_cache") for name, module in cached]
        resolved: dict[tuple[int, ModuleKind], tuple[TensorSpec, ...]] = {}
        specs = []
        for name, module, scheme, kind in quantized:
            key = (id(scheme), kind)
            if key not in resolved:
                self._check_suits(name, scheme, kind)
                resolved[key] = tensor_specs(scheme, kind, step, name)
            columns = getattr(module, "in_features", None) if kind == "linear" else None
            specs.append(ModuleSpec(name, scheme, resolved[key], kind, columns))
        return StepPlan(tuple(specs))

    def _check_suits(self, name: str, scheme: QuantizationScheme, kind: ModuleKind) -> None:
        """Refuse a scheme that does not suit a module of a kind."""
        if kind == "attention" and (scheme.weights or scheme.output_activations):
            raise RecipeError(
                f"'{name}' is an attention module: a scheme for it has input_activations only, "
                "which quantize q, k and v. To quantize weights, target its Linear modules."
            )
        is_ordered = scheme.weights is not None and scheme.weights.actorder is not None
        if is_ordered and not self.orders_columns:
            problem = "'actorder' is for GPTQ, which orders columns; observers do not"
            raise unfit(name, "weight", problem, hint="Leave it out")

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
            warnings.warn(no_effect(Option(key, owner=self.label())), stacklevel=3)

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

    @property
    def schemes(self) -> dict[str, QuantizationScheme]:
        """The schemes by the names of their groups, with their targets and observers."""
        schemes = {}
        for name, scheme in self._unobserved().items():
            observed = {}
            for base_name, field in SCHEME_FIELDS.items():
                args: QuantizationArgs | None = getattr(scheme, field)
                if args is None or args.dynamic is True:  # dynamic ones need no observer
                    continue
                choice = self._choice(base_name)
                if choice is None and named_observer(args) is None:
                    choice = self._default_choice(base_name, args.observer_kwargs or {})
                if choice is not None:
                    observed[field] = choice.put_into(args)
            schemes[name] = scheme.model_copy(deep=True).model_copy(update=observed)
        return schemes

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the patterns of what is meant, and of what is not."""
        return [t for scheme in self._unobserved().values() for t in scheme.targets], self.ignore

    def regrouped(self, size: int) -> Self | None:
        """Return the same with weights in groups of a size; None where none can have it."""
        if not any(has_free_groups(scheme.weights) for scheme in self.schemes.values()):
            return None
        groups = {name: regrouped(scheme, size) for name, scheme in self.schemes.items()}
        said = ("targets", "scheme", *ARGS_FIELDS)
        return self._changed({"config_groups": groups, **dict.fromkeys((*said, *_OBSERVER_KEYS))})

    def with_observer(self, key: str, choice: ObserverChoice) -> Self | None:
        """Return the same with another observer of weights, or of static activations."""
        base_names = ["weight"] if key == "weight_observer" else ["input", "output"]
        fields = [SCHEME_FIELDS[base_name] for base_name in base_names]
        watched = [getattr(each, field) for each in self._unobserved().values() for field in fields]
        if all(args is None or args.dynamic is True for args in watched):
            return None
        changes: dict[str, Any] = {f"{base_name}_observer": None for base_name in base_names}
        changes |= {name: args_without_observer(getattr(self, name)) for name in fields}
        if isinstance(self.scheme, QuantizationScheme):
            changes["scheme"] = without_observers(self.scheme, fields)
        if self.config_groups is not None:
            groups = self.config_groups.items()
            changes["config_groups"] = {n: without_observers(each, fields) for n, each in groups}
        if self.observer is not None:
            rest = dict.fromkeys("weights" if name == "weight" else name for name in base_names)
            changes["observer"] = self.observer.model_copy(update=rest)
        return self._changed({**changes, key: choice})

    def converted_to(self, kind: type[Modifier]) -> Modifier | None:
        """Return one of another kind that says the same; None where it quantizes no weights."""
        if not any(scheme.weights for scheme in self._unobserved().values()):
            return None
        if kind is type(self):
            return self
        shared = self.model_fields_set & kind.model_fields.keys()
        given = {name: getattr(self, name) for name in shared}
        return kind(**(given if kind.orders_columns else without_order(given)))

    def weight_formats(self) -> list[str]:
        """Say how weights are quantized, such as ``int4 per group 128``."""
        schemes = self._unobserved().values()
        tensors = (TensorSpec("weight", each.weights, None) for each in schemes if each.weights)
        return [f"{tensor.format} per {tensor.strategy}" for tensor in tensors]

    def _changed(self, changes: dict[str, Any]) -> Self:
        kept = {name: getattr(self, name) for name in self.model_fields_set - changes.keys()}
        given = {name: value for name, value in changes.items() if value is not None}
        return type(self)(**kept, **given)

    def to_data(self) -> dict[str, Any]:
        """Return the modifier as plain data, as a recipe would give it."""
        data: dict[str, Any] = {}
        if not isinstance(self.scheme, dict) and self.config_groups is None:
            data["targets"] = list(self.targets)
        for name in type(self).model_fields:
            value = getattr(self, name)
            says = value not in (None, ()) or value != type(self).model_fields[name].default
            if says and name not in ("targets", "unmatched"):
                data[name] = to_data(value)
        if data.get("targets") and isinstance(self.scheme, QuantizationScheme):
            data = {k: v for k, v in data.items() if k != "targets" or not self.scheme.targets}
        return data if self.unmatched == "error" else {**data, "unmatched": self.unmatched}

    def _unobserved(self) -> dict[str, QuantizationScheme]:
        if self.config_groups is not None:
            return self.config_groups
        if isinstance(self.scheme, str):
            return {"group_0": preset(self.scheme, self.targets)}
        if isinstance(self.scheme, dict):
            named = enumerate(self.scheme.items())
            return {f"group_{index}": preset(name, targets) for index, (name, targets) in named}
        if isinstance(self.scheme, QuantizationScheme):
            targets = self.scheme.targets or list(self.targets)
            return {"group_0": self.scheme.model_copy(update={"targets": targets})}
        given = {name: getattr(self, name) for name in ARGS_FIELDS}
        if not any(given.values()):
            return {}
        return {"group_0": build_scheme({"targets": list(self.targets), **given})}

    def _default_choice(self, base_name: str, options: dict[str, Any]) -> ObserverChoice:
        """Return the observer of what nobody has chosen one for."""
        return ObserverChoice(name=default_observer(base_name), options=options)

    def _choices(self, base_name: str) -> Iterator[tuple[str, ObserverChoice]]:
        """Go through the keys that choose the observer of weight, input or output."""
        alone = getattr(self, f"{base_name}_observer")
        if alone is not None:
            yield f"{base_name}_observer", alone
        if base_name != "weight" and self.activation_observer is not None:
            yield "activation_observer", self.activation_observer
        key = "weights" if base_name == "weight" else base_name
        together = None if self.observer is None else getattr(self.observer, key)
        if together is not None:
            yield f"observer.{key}", together

    def _choice(self, base_name: str) -> ObserverChoice | None:
        return next((choice for _, choice in self._choices(base_name)), None)


def _kind(
    model: torch.nn.Module, name: str, module: torch.nn.Module, targets: list[str]
) -> ModuleKind | None:
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        return "linear"
    if is_cached_attention_module(module) and is_targeted(model, targets, name, module):
        return "attention"
    return None


# Parameters of tensors, found from what was measured; work and results are shared by ranks


def solve_activations(layer: Layer) -> Solved:
    """Find the parameters of activations from what was measured of them."""
    mine: Solved = {}
    with layer.ranks.step("working out the parameters of activations"):
        for module in layer.modules:
            for tensor in module.tensors:
                if tensor.base_name == "weight" or tensor.observer is None:
                    continue
                place = module.name, tensor.base_name
                seen = {key: layer.measurements.get(*place, key) for key in (RANGE, COUNTS)}
                qparams = tensor.observer.solve_stream(seen, module.name)
                if qparams is not None:
                    mine[place] = qparams
    # A statistic that remembers its last value only differs from process to process.
    solved: Solved = {}
    for theirs in reversed(layer.ranks.share(mine)):
        solved |= theirs
    return solved


def solve_weights(layer: Layer) -> Solved:
    """Find the parameters of weights; those that share a global scale are solved together."""
    mine: Solved = {}
    with layer.ranks.step("working out the parameters of weights"):
        fused = fused_groups(layer.modules)
        sizes = {group: sum(map(layer.size, group)) for group in fused}
        groups = layer.ranks.my_part(fused, lambda group: sizes[group])
        small = [group for group in groups if sizes[group] <= _SMALL]
        large = [group for group in groups if sizes[group] > _SMALL]

        def solve(group: Group) -> Solved:
            measured = layer.measurements
            inputs = {each: measured.get(each.name, "input", IMPORTANCE) for each in group}
            return solve_group(layer, {each: layer.weight(each.name) for each in group}, inputs)

        with in_threads(solve, small) as solutions:
            for _ in counted_groups(layer, small, "choosing scales"):
                mine |= next(solutions)
        freed = FreedMemory()
        for group in counted_groups(layer, large, "choosing scales"):
            mine |= solve(group)
            freed.count(sum(layer.weight(module.name).nbytes for module in group))
    solved: Solved = {}
    for theirs in layer.ranks.share(mine):
        solved |= theirs
    return solved


def solve_group(
    layer: Layer,
    weights: Mapping[ModuleSpec, Tensor],
    inputs: Mapping[ModuleSpec, Statistic | None],
) -> Solved:
    """Return the parameters of weights, which may share a global scale.

    :param inputs: what is known of the inputs of each
    """
    problems = []
    for module, value in weights.items():
        spec = module.tensor("weight")
        assert spec is not None
        assert spec.observer is not None
        # Coverage tells of modules that saw nothing, once for all.
        is_told = module.name in layer.unseen
        problems.append(Weight(spec.observer, value, inputs[module], module.name, is_told))
    places = [(module.name, "weight") for module in weights]
    return dict(zip(places, observers.solve_weights(problems), strict=True))


def fused_groups(modules: Sequence[ModuleSpec]) -> list[Group]:
    """Put modules together whose weights share a global scale; others stand alone."""
    quantized = {module.name: spec for module in modules if (spec := module.tensor("weight"))}
    sharing = {name for name, spec in quantized.items() if has_global_scale(spec.args)}
    together = {
        name: group for group in topology.fused_groups(sharing, complete=True) for name in group
    }
    by_name = {module.name: module for module in modules}
    groups = dict.fromkeys(together.get(name, (name,)) for name in quantized)
    return [tuple(by_name[name] for name in group) for group in groups]


def counted_groups(layer: Layer, groups: list[Group], what: str) -> Iterator[Group]:
    """Go through groups of weights and show how far this is."""
    if not groups:
        return
    total = sum(map(len, groups))
    with layer.progress.counting(what, total, "weights") as add:
        for group in groups:
            layer.ranks.check()
            yield group
            add(len(group))
