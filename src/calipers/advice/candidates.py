"""What a module may become: a scheme, how its weight is rounded, and what finds its scales."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from calipers.engine.presets import RUNS, runs_on
from calipers.errors import (
    ConfigurationError,
    Option,
    group_sizes_for,
    listing,
    no_meaning,
    not_allowed,
)
from calipers.planning.specs import has_free_groups, regrouped
from calipers.recipes import Recipe, load_changed_recipe, load_recipe
from calipers.steps import QuantizationModifier
from calipers.steps.base import steps_by_method
from calipers.steps.choices import preset, preset_name, read_choice, scheme_to_data
from calipers.topology.names import groups_of_one_scheme, patterns_for

UNQUANTIZED = "UNQUANTIZED"
SOLVER: Mapping[str, Any] = {"name": "optimal", "importance": "imatrix"}
"""What finds the scales of weights that are rounded to nearest, if nobody says otherwise."""
_HALF_SIZE = ("W8A16", "W8A8")  # the first that runs on a target is offered
_ACTIVATIONS = "histogram_mse"


@dataclass(frozen=True)
class Candidate:
    """A scheme, a method and an observer of weights; without a recipe a module stays as it is.

    :param name: the scheme, and the method and the solver where there are several
    :param scheme: a preset; ``-g32`` behind it are groups of 32
    :param method: how weights are rounded: ``rtn`` or ``gptq``
    :param quantization: the scheme with its observers
    :param group_sizes: module → the size of its groups, where the one of the scheme does not fit
    """

    name: str
    scheme: str
    solver: str = ""
    method: str = ""
    recipe: Recipe | None = None
    quantization: QuantizationScheme | None = None
    group_sizes: Mapping[str, int] = field(default_factory=dict)

    def scheme_of(self, module: str) -> str:
        """Return the scheme that a module has in this candidate."""
        size = self.group_sizes.get(module)
        return self.scheme if size is None else f"{self.scheme}-g{size}"

    def config_groups(self, modules: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the groups of a recipe that give modules their schemes of this candidate."""
        by_size: dict[int | None, list[str]] = {}
        for module in modules:
            by_size.setdefault(self.group_sizes.get(module), []).append(module)
        groups = {}
        assert self.quantization is not None
        for size, names in by_size.items():
            scheme = self.quantization if size is None else regrouped(self.quantization, size)
            name = self.name.replace(self.scheme, self.scheme_of(names[0]), 1)
            groups[name] = {**scheme_to_data(scheme), "targets": patterns_for(names)}
        return groups

    def fitted(self, columns: Mapping[str, int]) -> Candidate:
        """Return the same with groups that divide every weight.

        :param columns: of the weights that are quantized, by module
        """
        args = None if self.quantization is None else self.quantization.weights
        if args is None or not has_free_groups(args) or _group_size(self.scheme) is not None:
            return self
        assert args.group_size is not None
        group_sizes: dict[str, int] = {}
        for names in groups_of_one_scheme(columns):
            common = math.gcd(*(columns[name] for name in names))
            fitting = [size for size in group_sizes_for(common) if size <= args.group_size]
            # Powers of two first: those are the sizes that the kernels of vLLM are written for.
            size = max(fitting, key=lambda n: (n & (n - 1) == 0, n), default=args.group_size)
            if size != args.group_size:
                group_sizes |= dict.fromkeys(names, size)
        if not group_sizes:
            return self
        made = replace(self, group_sizes=group_sizes)
        modifier = steps_by_method()[self.method](config_groups=made.config_groups(columns))
        return replace(made, recipe=load_recipe(modifier))


def read_schemes(
    schemes: str | Iterable[str] | None, target: str | None, group_size: int | None
) -> tuple[list[str], list[str]]:
    """Return the schemes that are compared, and those that were asked for and do not run.

    >>> read_schemes(None, "vllm-cpu", 64)
    (['W4A16-g64', 'W8A8', 'UNQUANTIZED'], [])
    >>> read_schemes("W4A16, W8A16", "vllm-cpu", None)
    (['W4A16'], ['W8A16'])
    """
    if target is not None and target not in RUNS:
        raise not_allowed("target", target, RUNS)

    def runs(name: str) -> bool:
        return target is None or target in runs_on(_preset(name))

    if schemes is None:
        schemes = ("W4A16", *list(filter(runs, _HALF_SIZE))[:1], UNQUANTIZED)
    asked = []
    for word in map(str, schemes.split(",") if isinstance(schemes, str) else schemes):
        size = _group_size(word)
        asked.append(preset_name(_preset(word)) + ("" if size is None else f"-g{size}"))
    asked = list(dict.fromkeys(asked))
    names, left_out = list(filter(runs, asked)), list(filterfalse(runs, asked))
    if not set(names) - {UNQUANTIZED}:
        if target is None or not left_out:
            hint = "Pass " + Option("schemes", "W4A16,W8A16")
            raise ConfigurationError("There is no scheme to choose", hint=hint)
        raise ConfigurationError(
            f"runs none of the schemes to choose from ({listing(left_out)})",
            subject=Option("target", target),
            allowed=[name for name in RUNS[target] if name != UNQUANTIZED],
        )
    return (names if group_size is None else _regrouped(names, group_size)), left_out


def _regrouped(names: list[str], size: int) -> list[str]:
    """Give schemes whose groups are free and that do not say otherwise groups of a size."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise not_allowed("group_size", size, "a whole number, 1 or more")
    changed = list(names)
    for place, name in enumerate(names):
        if name != UNQUANTIZED and _group_size(name) is None:
            scheme = preset(name, ("Linear",))
            changed[place] = f"{name}-g{size}" if has_free_groups(scheme.weights) else name
    if changed == names:
        where = f"{listing(names)}: groups are fixed, or there are none"
        raise no_meaning("group_size", size, where)
    return changed


def read_methods(methods: str | Iterable[str]) -> tuple[str, ...]:
    """Return how weights may be rounded; refuse what there is not.

    >>> read_methods("gptq, rtn")
    ('gptq', 'rtn')
    """
    words = methods.split(",") if isinstance(methods, str) else methods
    names = tuple(dict.fromkeys(str(word).strip() for word in words))
    known = [name for name, step in steps_by_method().items() if not step.runs_layers]
    for name in names or ("",):
        if name not in known:
            raise not_allowed("method", name, known)
    return names


def read_candidates(
    schemes: Iterable[str],
    methods: Collection[str],
    solvers: Iterable[Any] | None,
    ignore: Sequence[str],
) -> tuple[Candidate, ...]:
    """Return every scheme with every method and every solver; refuse what there is not.

    >>> solvers = ["optimal", "memoryless_mse"]
    >>> found = read_candidates(["W4A16-g32", "UNQUANTIZED"], ["rtn"], solvers, [])
    >>> [each.name for each in found]
    ['W4A16-g32 optimal', 'W4A16-g32 memoryless_mse', 'UNQUANTIZED']
    >>> [each.name for each in read_candidates(["W4A16"], ["rtn", "gptq"], None, [])]
    ['W4A16 rtn', 'W4A16 gptq']
    """
    chosen = None if solvers is None else [read_choice(each) for each in solvers]
    if chosen == []:
        problem = "There is nothing that finds scales"
        raise ConfigurationError(problem, hint="Pass " + Option("solvers", "optimal"))
    candidates: list[Candidate] = []
    for name in schemes:
        if name == UNQUANTIZED:
            candidates.append(Candidate(name, name))
            continue
        modifier = QuantizationModifier(
            scheme=_preset(name), ignore=tuple(ignore), unmatched="ignore"
        )
        inputs = preset(_preset(name), modifier.targets).input_activations
        is_static = inputs is not None and inputs.dynamic is False
        for method in methods:
            importance = SOLVER["importance"] if method == "rtn" else "hessian"
            default = read_choice({**SOLVER, "importance": importance})
            for choice in [default] if chosen is None else chosen:
                recipe = load_changed_recipe(
                    modifier,
                    method=method,
                    group_size=_group_size(name),
                    weight_observer=choice,
                    activation_observer=_ACTIVATIONS if is_static else None,
                )
                (step,) = recipe.modifiers
                assert isinstance(step, QuantizationModifier)
                (scheme,) = step.schemes.values()
                options = "".join(f",{key}={value}" for key, value in choice.options.items())
                solver, label = choice.name + options, name
                if len(methods) > 1:
                    label += f" {method}"
                if chosen is not None and len(chosen) > 1:
                    label += f" {solver}"
                candidates.append(Candidate(label, name, solver, method, recipe, scheme))
    return tuple(candidates)


def _preset(word: str) -> str:
    return re.sub(r"-g\d+$", "", word.strip())


def _group_size(word: str) -> int | None:
    found = re.search(r"-g(\d+)$", word.strip())
    return None if found is None else int(found[1])
