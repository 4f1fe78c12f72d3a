"""A model under observation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calipers.errors.base import CalipersError, ConfigurationError, ModelRunError
from calipers.errors.formatting import counted, first_line, nearest, shortened
from calipers.errors.observing import LayoutError
from calipers.errors.text import ANY, Call, Option, Text, Words

_ALL_EXPERTS = "show all tokens to all experts (" + Option("calibrate_all_experts", True) + ")"
_WEIGHTS_ONLY = Option("on_unseen", "weights_only")
_UNSEEN_HINTS: dict[str, Words] = {
    "error": (
        "Give more or other data, "
        + _ALL_EXPERTS
        + ", ignore these modules, or choose what to do without data: "
        + _WEIGHTS_ONLY
        + " (their activations stay as they are) or, for experts, "
        + Option("on_unseen", "peers")
        + " (the largest range among their siblings)"
    ),
    "weights_only": "They have no weights to fall back on. Give more or other data",
    "peers": (
        "They have no siblings that saw any. Give more or other data, "
        + _ALL_EXPERTS
        + ", ignore these modules, or pass "
        + _WEIGHTS_ONLY
    ),
}


class NoDataError(ConfigurationError):
    """A plan that needs data, and no data that runs."""

    def __init__(self, tensors: Sequence[str], *, has_dataset: bool = False) -> None:
        problem, remedy = (
            (Option("pipeline", "datafree") + " uses none", "Choose another pipeline")
            if has_dataset
            else ("there is no " + Option("dataset"), "Pass " + Option("dataset", ANY))
        )
        super().__init__(
            f"The recipe needs data for {counted(len(tensors), 'tensor')} (the first is "
            f"{tensors[0]}), and " + problem,
            hint=Text.of(remedy)
            + ", or choose dynamic activations and observers that look at weights alone. "
            + Call("plan.table")
            + " shows which tensors need data",
        )


class ChangedInputError(ModelRunError):
    """A tensor that was changed in place while it was being shared."""

    def __init__(self, where: str) -> None:
        super().__init__(
            "reads a tensor that other modules read too, and that one of them changes in place "
            "before all have read it: it cannot be measured once for all",
            subject=where,
            hint="Pass " + Option("share_inputs", False) + " to measure it for each of them",
        )


class ForwardError(ModelRunError):
    """A model that fails while data runs through it."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(
            f"failed while data ran through it: {problem}",
            subject=model,
            hint="If it fails in transformers by itself, too, compare its config.json with the "
            "original",
        )


class UnseenModulesError(CalipersError, ValueError):
    """Modules whose parameters need data that never reached them."""

    exit_code = 4

    def __init__(self, names: Sequence[str], policy: str) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{counted(len(names), 'module')} saw no tokens: {shortened(names)}",
            hint=_UNSEEN_HINTS[policy],
        )


class NoDecoderLayersError(ConfigurationError):
    """A model that has no stack of layers to go through one by one."""

    def __init__(self, model: str) -> None:
        super().__init__(
            "has no ModuleList of layers, so it cannot be calibrated layer by layer",
            subject=model,
            hint="Pass " + Option("pipeline", "basic"),
        )


class FusedExpertsError(CalipersError, NotImplementedError):
    """Experts in stacked parameters that cannot be told apart faithfully."""

    exit_code = 3

    def __init__(self, where: str, module_class: str, problem: str) -> None:
        super().__init__(
            f"are stacked in one parameter and cannot be turned into Linear layers: {problem}",
            subject=f"The experts of '{where}' ({module_class})",
            hint='To quantize the rest of the model, leave them out: ignore: ["re:.*experts.*"]',
        )


class MaskShapeError(LayoutError):
    """A mask whose tokens are not those of the tensor that is watched."""

    def __init__(self, where: str, mask: tuple[int, ...], tensor: tuple[int, ...]) -> None:
        super().__init__(
            f"the mask of shape {mask} does not say which tokens of the tensor of shape {tensor} "
            "count",
            where=where,
            hint="Use "
            + Option("batch_size", 1)
            + " or pack the data, so that there is no padding",
        )


class HiddenQueriesError(ConfigurationError):
    """An attention implementation in which queries cannot be looked at."""

    def __init__(self, model: str, implementation: str) -> None:
        super().__init__(
            f"computes attention by '{implementation}', in which the queries cannot be seen or "
            "quantized",
            subject=model,
            hint='Call model.set_attn_implementation("sdpa") first, or quantize the keys and '
            "values alone (kv_cache_scheme)",
        )


class UnknownChoiceError(ConfigurationError):
    """A word that is none of those an option knows."""

    def __init__(self, option: str, given: object, known: Iterable[str]) -> None:
        known = list(known)
        super().__init__(
            "is not allowed",
            subject=Option(option, given),
            meant=nearest(str(given), known),
            allowed=known,
        )


class DeviceError(ConfigurationError):
    """A device that there is not."""

    def __init__(self, given: object, problem: str) -> None:
        super().__init__(
            f"cannot be used: {first_line(problem)}",
            subject=Option("device", given),
            hint="Give a device of torch such as 'cpu' or 'cuda:0', or leave it out to compute "
            "where the model is",
        )
