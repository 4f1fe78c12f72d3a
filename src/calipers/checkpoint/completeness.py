"""Whether the files of a checkpoint hold the weights of the model that its config describes.

transformers gives weights that it does not find random values. So the names, shapes and dtypes in
the headers are sent through its own loading first, with tensors that have no values: what it would
miss, ignore or refuse is known before anything is loaded, and before memory is taken for a model
whose config asks for more than there is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.utils import patch_attr

from calipers.checkpoint.headers import first_float_dtype, stored_tensors
from calipers.errors import ModelLoadError, counted, damaged_file, shortened
from calipers.files.safetensors_header import StoredTensor
from calipers.topology.names import expert_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HALVES = {torch.float16, torch.bfloat16}
_FEW_TENSORS = 1000
_MANY_TENSORS = 1 << 20
_FEW_BYTES = 1 << 30


def check_weights(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Refuse a folder whose files do not hold exactly the weights that its config asks for.

    Only what the architecture itself ties, computes or ignores may differ.
    """
    stored = stored_tensors(folder)
    if not stored:
        return  # a plan needs no weights, and transformers says it if a model does
    _check_experts(folder, config, stored)
    config = deepcopy(config)  # a quantizer writes into it
    quantizer = _quantizer(config)
    dtype = config.dtype or first_float_dtype(stored)
    most = 4 * len(stored) + _FEW_TENSORS
    model = build_on_meta(config, trust_remote_code, dtype, most_tensors=most)
    _check_buffers(folder, model, stored)
    if quantizer is not None:
        quantizer.preprocess_model(
            model=model,
            dtype=dtype,
            device_map=None,
            checkpoint_files=None,
            use_kernels=False,
        )
    _check_dtypes(folder, model, stored, quantizer is not None)
    refuse_different(str(folder), model, _load_without_values(model, stored, quantizer))


def refuse_different(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Refuse a model if transformers tells that it missed, ignored or changed weights.

    :param info: what ``from_pretrained`` returns with ``output_loading_info=True``
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = [
        f"{key} is {tuple(found)}, not {tuple(wanted)}"
        for key, found, wanted in info["mismatched_keys"]
    ]
    converted = info.get("conversion_errors", {})
    mismatched += [f"{key} cannot be put together" for key in converted]
    missing -= set(converted)
    unexpected -= {key for key, _ in model.named_buffers()}  # which the model computes itself
    if getattr(model.config, "quantization_config", None) is not None:
        unexpected = {key for key in unexpected if not _is_parameter_of_expert(key)}
    if missing or unexpected or mismatched:
        raise _other_weights(name, type(model).__name__, missing, unexpected, mismatched)


def build_on_meta(
    config: PreTrainedConfig,
    trust_remote_code: bool,
    dtype: torch.dtype | str | None,
    *,
    most_tensors: int = _MANY_TENSORS,
) -> PreTrainedModel:
    """Build a model whose tensors have shapes and dtypes, and no values.

    :param most_tensors: how many tensors it may have; a config can ask for any number
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), _no_more_than(most_tensors, str(config.name_or_path)):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


def _quantizer(config: PreTrainedConfig) -> Any:
    from transformers.quantizers.auto import get_hf_quantizer

    found, _, _ = get_hf_quantizer(config, None, None, True, {})  # type: ignore[no-untyped-call]
    return found


def _load_without_values(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], quantizer: Any
) -> dict[str, Any]:
    """Let transformers load tensors without values, and return what it tells of it."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
    }
    how = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(  # type: ignore[arg-type]
            model, None, quantizer
        ),
    )
    with patch_attr(core_model_loading, "tqdm", lambda items, **_: items):  # no bar for nothing
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, empty, how)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return {**info.to_dict(), "conversion_errors": info.conversion_errors}


@contextmanager
def _no_more_than(tensors: int, name: str) -> Iterator[None]:
    """Stop building a model that has too many tensors."""
    register = torch.nn.Module.register_parameter
    left = tensors

    def counted(module: torch.nn.Module, key: str, parameter: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            problem = f"it describes a model of more than {tensors:,} tensors"
            raise damaged_file(Path(name) / "config.json", problem)
        register(module, key, parameter)

    with patch_attr(torch.nn.Module, "register_parameter", counted):
        yield


def _check_buffers(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> None:
    """Refuse a config whose computed tensors, which no file holds, would fill the memory."""
    needed = sum(buffer.nbytes for buffer in model.buffers())
    if needed > 4 * sum(tensor.size for tensor in stored.values()) + _FEW_BYTES:
        problem = f"the model that it describes computes {needed / 1e9:,.0f} GB of buffers"
        raise damaged_file(folder / "config.json", problem)


def _check_dtypes(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, StoredTensor], quantized: bool
) -> None:
    """Refuse tensors whose bits would be read as other numbers than they were written as."""
    expected = model.state_dict()
    dtypes = {tensor.dtype for tensor in stored.values()}
    mixed = not quantized and dtypes.issuperset(_HALVES)
    different = []
    for name, tensor in stored.items():
        wanted = expected[name].dtype if name in expected else tensor.dtype
        if name not in expected and name.endswith(".weight") and not quantized:
            wanted = model.dtype  # of a tensor that transformers converts
        if _is_other_kind(tensor.dtype, wanted) or (mixed and _other_half(tensor.dtype, wanted)):
            different.append(f"{name} is {tensor.dtype}, not {wanted}")
    if different:
        raise _other_weights(str(folder), type(model).__name__, mismatched=different)


def _is_other_kind(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers change their meaning, and not only their precision."""
    if found.is_floating_point != wanted.is_floating_point:
        return True
    return found != wanted and found.itemsize == wanted.itemsize == 1


def _other_half(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a dtype of 16 bits is not the one of the model; one checkpoint has one of them."""
    return {found, wanted} == _HALVES


def _check_experts(
    folder: Path, config: PreTrainedConfig, stored: Mapping[str, StoredTensor]
) -> None:
    """Refuse experts of which some tensors are missing.

    transformers takes those it finds in the order of their numbers, whatever these are.
    """
    numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in stored:
        if expert := expert_of(name):
            numbers[expert.experts][expert.rest].add(expert.number)
    missing = []
    for experts, tensors in numbers.items():
        every = range(max(max(found) for found in tensors.values()) + 1)
        if len(every) > len(stored):
            raise damaged_file(folder, f"'{experts}' has an expert with number {every[-1]}")
        for tensor, found in tensors.items():
            missing += [f"{experts}.{number}.{tensor}" for number in every if number not in found]
    if missing:
        raise _other_weights(str(folder), type(config).__name__.removesuffix("Config"), missing)


def _other_weights(
    name: str,
    model: str,
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
    mismatched: Iterable[str] = (),
) -> ModelLoadError:
    """Say how files of weights differ from those of the model that the config describes.

    :param missing: tensors of the model that no file holds
    :param unexpected: tensors of the files that the model has no place for
    :param mismatched: tensors that are not as the model has them, each with how they differ
    """
    kinds = {"missing": missing, "unknown to the model": unexpected, "different": mismatched}
    told = [
        f"{counted(len(tensors), 'tensor')} {kind} ({shortened(tensors)})"
        for kind, tensors in ((kind, sorted(tensors)) for kind, tensors in kinds.items())
        if tensors
    ]
    return ModelLoadError(
        f"are not those of the {model} that its config.json describes: {'; '.join(told)}. "
        "Nothing was put in their place",
        subject=f"The weights of '{name}'",
        hint="Compare config.json with the original, or copy or download the model again.",
    )


def _is_parameter_of_expert(key: str) -> bool:
    """Whether a tensor is one of those for which transformers has no place in fused experts.

    Whoever wrote the checkpoint was warned of it; vLLM reads them.
    """
    return expert_of(key) is not None and key.endswith(("_scale", "_zero_point"))
