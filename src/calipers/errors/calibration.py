"""A model under observation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calipers.errors.base import (
    CalipersError,
    ConfigurationError,
    counted,
    did_you_mean,
    listing,
    shortened,
)
from calipers.errors.observing import LayoutError

_UNSEEN_HINTS = {
    "error": (
        "Give more or other data, show all tokens to all experts (calibrate_all_experts=True), "
        "ignore these modules, or choose what to do without data: "
        'on_unseen="weights_only" (their activations stay as they are) or, for experts, '
        'on_unseen="peers" (the largest range among their siblings).'
    ),
    "weights_only": "They have no weights to fall back on. Give more or other data.",
    "peers": (
        "They have no siblings that saw any. Give more or other data, show all tokens to all "
        "experts (calibrate_all_experts=True), ignore these modules, or pass "
        'on_unseen="weights_only".'
    ),
}


class ChangedInputError(CalipersError, RuntimeError):
    """A tensor that was changed in place while it was being shared."""

    exit_code = 3

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} reads a tensor that other modules read too, and that one of them changes in "
            "place before all have read it: it cannot be measured once for all. Pass "
            "share_inputs=False to measure it for each of them."
        )


class ForwardError(CalipersError, RuntimeError):
    """A model that fails while data runs through it."""

    exit_code = 3

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(
            f"{model} failed while data ran through it: {problem}. If it fails in transformers by "
            "itself, too, compare its config.json with the original."
        )


class UnseenModulesError(CalipersError, ValueError):
    """Modules whose parameters need data that never reached them."""

    exit_code = 4

    def __init__(self, names: Sequence[str], policy: str) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{counted(len(names), 'module')} saw no tokens: {shortened(names)}. "
            f"{_UNSEEN_HINTS[policy]}"
        )


class NoDecoderLayersError(ConfigurationError):
    """A model that has no stack of layers to go through one by one."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has no ModuleList of layers, so it cannot be calibrated layer by layer. "
            'Pass pipeline="basic".'
        )


class FusedExpertsError(CalipersError, NotImplementedError):
    """Experts in stacked parameters that cannot be told apart faithfully."""

    exit_code = 3

    def __init__(self, where: str, module_class: str, problem: str) -> None:
        super().__init__(
            f"The experts of '{where}' ({module_class}) are stacked in one parameter and cannot be "
            f"turned into Linear layers: {problem}. "
            'To quantize the rest of the model, leave them out: ignore: ["re:.*experts.*"].'
        )


class MaskShapeError(LayoutError):
    """A mask whose tokens are not those of the tensor that is watched."""

    def __init__(self, where: str, mask: tuple[int, ...], tensor: tuple[int, ...]) -> None:
        super().__init__(
            f"{where}: the mask of shape {mask} does not say which tokens of the tensor of shape "
            f"{tensor} count. Use batch_size=1 or pack the data, so that there is no padding."
        )


class HiddenQueriesError(ConfigurationError):
    """An attention implementation in which queries cannot be looked at."""

    def __init__(self, model: str, implementation: str) -> None:
        super().__init__(
            f"{model} computes attention by '{implementation}', in which the queries cannot be "
            'seen or quantized. Call model.set_attn_implementation("sdpa") first, or quantize the '
            "keys and values alone (kv_cache_scheme)."
        )


class UnknownChoiceError(ConfigurationError):
    """A word that is none of those an option knows."""

    def __init__(self, option: str, given: object, known: Iterable[str]) -> None:
        known = list(known)
        super().__init__(
            f"{option}={given!r} is not allowed.{did_you_mean(str(given), known)} "
            f"Allowed: {listing(known)}."
        )


class DeviceError(ConfigurationError):
    """A device that there is not."""

    def __init__(self, given: object, problem: str) -> None:
        super().__init__(
            f"device={given!r} cannot be used: {problem.strip().splitlines()[0].rstrip('.')}. Give "
            "a device of torch such as 'cpu' or 'cuda:0', or leave it out to compute where the "
            "model is."
        )
