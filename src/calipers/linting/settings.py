"""What the config of a checkpoint says about how it is quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn

from calipers.errors import ConfigurationError, cannot_load, damaged_file, library_errors
from calipers.files.json_files import read_json_object
from calipers.kernels.packing import IN_BYTES, IN_PAIRS, IN_WORDS

_KEYS = ("quantization_config", "compression_config")
_METHOD = "compressed-tensors"
_MEANT = "Give the folder of a checkpoint in one of the formats of compressed-tensors."


def read_settings(folder: Path) -> QuantizationConfig:
    """Return the quantization config of a folder; refuse one that is not quantized."""
    if not folder.is_dir():
        raise cannot_load(str(folder), "it is a file" if folder.exists() else "no such folder")
    file = folder / "config.json"
    if not file.is_file():
        raise cannot_load(str(folder), "there is no config.json in it")
    config = read_json_object(file)
    found = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if found is None:
        raise _refused(folder, "is not quantized: its config has no quantization_config")
    if not isinstance(found, dict):
        raise damaged_file(file, f"'quantization_config' must be an object, got {found!r}")
    method = found.get("quant_method", _METHOD)
    if method != _METHOD:
        raise _refused(folder, f"is quantized in the way of '{method}', not of {_METHOD}")
    with library_errors(lambda words: damaged_file(file, f"quantization_config: {words}")):
        settings = QuantizationConfig.model_validate(_known(found))
    _check_format(folder, settings)
    return settings


def _known(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of quantization; there are keys about the library and sparsity, too."""
    fields = QuantizationConfig.model_fields
    return {"config_groups": {}} | {key: each for key, each in found.items() if key in fields}


def _check_format(folder: Path, settings: QuantizationConfig) -> None:
    known = {form.value for form in IN_WORDS | IN_PAIRS | IN_BYTES}
    mixed, dense = CompressionFormat.mixed_precision.value, CompressionFormat.dense.value
    with_weights = [group for group in settings.config_groups.values() if group.weights is not None]
    wanted = [settings.format, *(group.format for group in with_weights if group.format)]
    if settings.format == dense and not with_weights:
        if settings.kv_cache_scheme is None and not settings.config_groups:
            raise _refused(folder, "is not quantized: its quantization_config names nothing")
        return
    for each in wanted:
        form = getattr(each, "value", each)
        if form in (dense, "fakequant"):
            raise _refused(folder, f"holds weights that are not quantized (format '{form}')")
        if form not in known | {mixed}:
            raise _refused(folder, f"has the format '{form}', which is not known here")


def _refused(folder: Path, what: str) -> ConfigurationError:
    return ConfigurationError(what, subject=f"The checkpoint '{folder}'", hint=_MEANT)


def format_of(scheme: QuantizationScheme, settings: QuantizationConfig) -> CompressionFormat | None:
    """Return the format in which the weights of a scheme are stored; None without weights."""
    from compressed_tensors.compressors.format import infer_module_format

    if scheme.weights is None:
        return None
    if scheme.format is not None:
        return CompressionFormat(scheme.format)
    if settings.format == CompressionFormat.mixed_precision.value:
        return CompressionFormat(infer_module_format(nn.Linear, scheme))
    return CompressionFormat(settings.format)
