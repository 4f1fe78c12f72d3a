"""``calipers.lint`` finds each defect of a checkpoint, by its own name and at its place."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from linting import DOWN, Q, checkpoint, damaged, of_groups, sources, with_config, with_value
from safetensors.torch import load_file, save_file

import calipers
from calipers.errors import CalipersError, ConfigurationError, ModelLoadError
from calipers.reporting.description import describe_checkpoint
from calipers.reporting.page import page_data

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

ATTENTION = "model.layers.0.self_attn"
NORM = "model.layers.0.input_layernorm.weight"
NAN, INF = math.nan, math.inf


class Defect(NamedTuple):
    """What is done to one tensor, or to the config, and what must be found; where: the tensor."""

    checkpoint: str
    check: str
    tensor: str
    change: Any = None
    where: str | None = None
    config: Any = None


SCALE, PACKED, CODES = f"{Q}.weight_scale", f"{Q}.weight_packed", f"{Q}.weight"
GLOBAL, INPUT, INPUT_GLOBAL = (
    f"{Q}.{each}" for each in ("weight_global_scale", "input_scale", "input_global_scale")
)
ZEROS, NOTED, KEYS = f"{Q}.weight_zero_point", f"{Q}.weight_shape", f"{ATTENTION}.k_scale"
DOWN_SCALE, DOWN_GLOBAL = f"{DOWN}.weight_scale", f"{DOWN}.weight_global_scale"
HEAD = "lm_head.weight"
HALF = torch.full((1,), 0.5)
ONES = torch.ones(128, 1, dtype=torch.int8)


def without_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def with_rest(packed: torch.Tensor) -> torch.Tensor:
    return packed | (1 << 30)


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat(2)


def larger(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.5


def half_full(packed: torch.Tensor) -> torch.Tensor:
    packed[:, ::2] = -1
    return packed


def overdriven(codes: torch.Tensor) -> torch.Tensor:
    return (codes.float() * 20).clamp(-448, 448).to(codes.dtype)


DEFECTS = {
    "NaN": Defect("W4A16", "scale-nan", SCALE, with_value(NAN, 3)),
    "Inf": Defect("W8A8", "scale-inf", SCALE, with_value(INF, 3)),
    "zero": Defect("W4A16", "scale-zero", SCALE, with_value(0)),
    "negative, asymmetric": Defect("W4A16_ASYM", "scale-negative", SCALE, with_value(-1)),
    "negative, fp8": Defect("FP8", "scale-negative", SCALE, with_value(-1)),
    "negative, fp4": Defect("NVFP4", "scale-negative", SCALE, with_value(-1)),
    "negative global": Defect("NVFP4", "scale-negative", DOWN_GLOBAL, with_value(-1)),
    "negative of an input": Defect("FP8", "scale-negative", INPUT, with_value(-1)),
    "negative of keys": Defect("kv", "scale-negative", KEYS, with_value(-1)),
    "denormal": Defect("W4A16", "scale-denormal", SCALE, with_value(1e-39)),
    "ones": Defect("FP8", "scale-default", INPUT, torch.ones_like),
    "NaN in e4m3": Defect("NVFP4", "scale-nan", SCALE, with_value(NAN)),
    "NaN of MX": Defect("MXFP4", "scale-nan", SCALE, with_value(255)),
    "least of MX": Defect("MXFP8", "scale-denormal", SCALE, with_value(0)),
    "ones of MX": Defect("MXFP4", "scale-default", SCALE, lambda t: t * 0 + 127),
    "zero global": Defect("NVFP4", "scale-zero", DOWN_GLOBAL, with_value(0)),
    "fused": Defect("NVFP4A16", "fused-global-scale", GLOBAL, larger, ATTENTION),
    "fused inputs": Defect("NVFP4", "fused-global-scale", INPUT_GLOBAL, larger, ATTENTION),
    "no scale": Defect("W4A16", "scale-missing", SCALE, None, Q),
    "no global scale": Defect("NVFP4", "global-scale-missing", DOWN_GLOBAL, None, DOWN),
    "no input scale": Defect("FP8", "scale-missing", INPUT, None, Q),
    "no key scale": Defect("kv", "kv-scale-missing", KEYS, None, ATTENTION),
    "no zero point": Defect("W4A16_ASYM", "zero-point-missing", ZEROS, None, Q),
    "no codes": Defect("W4A16", "weight-missing", PACKED, None, Q),
    "no norm": Defect("W4A16", "weight-missing", NORM, None),
    "other norm": Defect("W4A16", "shape-weight", NORM, without_last),
    "unwanted": Defect("W4A16", "tensor-unwanted", INPUT, HALF),
    "unwanted key scale": Defect("W4A16", "tensor-unwanted", KEYS, HALF),
    "ignored": Defect("W4A16", "ignored-quantized", "", None, Q, lambda c: c["ignore"].append(Q)),
    "ignored fp8": Defect(
        "FP8_DYNAMIC", "ignored-quantized", "", None, Q, lambda c: c["ignore"].append(Q)
    ),
    "not ignored": Defect(
        "W4A16", "not-quantized", "", None, "lm_head", lambda c: c.update(ignore=[])
    ),
    "scale shape": Defect("W4A16", "shape-scale", DOWN_SCALE, without_last),
    "block scale shape": Defect("FP8_BLOCK", "shape-scale", DOWN_SCALE, lambda t: t[:, :1]),
    "packed shape": Defect("W4A16", "shape-packed", PACKED, without_last),
    "pairs shape": Defect("NVFP4", "shape-packed", PACKED, without_last),
    "fp8 shape": Defect("FP8", "shape-packed", CODES, without_last),
    "noted shape": Defect("W4A16", "shape-weight", NOTED, lambda t: t + 1),
    "zero point shape": Defect("W4A16_ASYM", "shape-zero-point", ZEROS, without_last),
    "global shape": Defect("NVFP4", "shape-global-scale", GLOBAL, twice),
    "key scale shape": Defect("kv", "shape-scale", KEYS, twice),
    "scale dtype": Defect("NVFP4", "config-dtype", SCALE, lambda t: t.bfloat16()),
    "code dtype": Defect("FP8", "config-dtype", CODES, lambda t: t.view(torch.int8)),
    "padding": Defect("narrow", "packed-padding", PACKED, with_rest),
    "padding of zeros": Defect("narrow", "packed-padding", ZEROS, with_rest),
    "outside": Defect("int4 in bytes", "code-range", CODES, with_value(100), Q),
    "NaN codes": Defect("FP8", "code-nan", CODES, with_value(NAN), Q),
    "saturated": Defect("W4A16", "codes-saturated", PACKED, half_full, Q),
    "saturated fp8": Defect("FP8", "codes-saturated", CODES, overdriven, Q),
    "saturated pairs": Defect("NVFP4A16", "codes-saturated", PACKED, lambda t: t | 0x66, Q),
    "unused": Defect("W8A8", "codes-unused", CODES, lambda t: t // 64, Q),
    "NaN in a norm": Defect("W4A16", "tensor-nan", NORM, with_value(NAN, 2)),
    "Inf in a head": Defect("W4A16", "tensor-inf", HEAD, with_value(-INF, 2)),
    "zero point of symmetric": Defect("W8A8", "zero-point-symmetric", ZEROS, ONES),
}


@pytest.mark.parametrize("defect", list(DEFECTS))
def test_a_defect(defect: str, place: Path, tmp_path: Path) -> None:
    """It is found under its id, at its place, and nothing else is."""
    made = DEFECTS[defect]
    tensors = {made.tensor: made.change} if made.tensor else {}
    folder = damaged(checkpoint(place, made.checkpoint), tmp_path, tensors, made.config)
    found = calipers.lint(folder)
    assert found.checks == {made.check: (made.where or made.tensor,)}, found.findings


@pytest.mark.parametrize(
    ("name", "config", "check", "told"),
    [
        ("W4A16", of_groups(num_bits=8), "config-bits", "has room for 4 bits a value"),
        ("W4A16", of_groups(group_size=64), "config-group-size", "for every 128 columns"),
        ("W4A16", of_groups(group_size=96), "config-group-size", "96, which does not divide"),
        (
            "W8A8",
            lambda c: as_format(c, "pack-quantized"),
            "config-format",
            "stores 'weight_packed'",
        ),
        ("NVFP4A16", lambda c: as_format(c, "naive-quantized"), "config-format", "stores 'weight'"),
        (
            "W8A8",
            of_groups(type="float"),
            "config-dtype",
            "is int8, and its scheme asks for float8",
        ),
    ],
)
def test_a_config_of_other_tensors(
    name: str, config: Any, check: str, told: str, place: Path, tmp_path: Path
) -> None:
    found = calipers.lint(damaged(checkpoint(place, name), tmp_path, config=config))
    assert len(found.checks[check]) == 14
    assert any(told in each.problem for each in found.findings if each.check == check)


def as_format(config: dict[str, Any], form: str) -> None:
    config["format"] = form
    for group in config["config_groups"].values():
        group["format"] = form


def test_zero_points_out_of_range(place: Path, tmp_path: Path) -> None:
    """Those of 4 bits that have bytes of their own."""
    folder = checkpoint(place, "int4 in bytes")
    zeros = {f"{Q}.weight_zero_point": torch.full((128, 1), -8, dtype=torch.int8)}
    zeros[f"{Q}.weight_zero_point"][5] = 8
    others = {
        name.replace("_scale", "_zero_point"): torch.zeros(len(tensor), 1, dtype=torch.int8)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("weight_scale")
    }
    found = calipers.lint(
        damaged(folder, tmp_path, {**others, **zeros}, of_groups(symmetric=False))
    )
    assert found.checks == {"zero-point-range": (f"{Q}.weight_zero_point",)}
    assert found.findings[0].problem == "has 1 of 128 values outside of -8 to 7"


class TestIndex:
    def split(self, sound: Path, place: Path) -> tuple[Path, dict[str, Any]]:
        folder = damaged(sound, place)
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        parts: dict[str, dict[str, Any]] = {"a.safetensors": {}, "b.safetensors": {}}
        for number, (name, tensor) in enumerate(found.items()):
            parts["ab"[number % 2] + ".safetensors"][name] = tensor
        for file, tensors in parts.items():
            save_file(tensors, folder / file)
        index = {"metadata": {}, "weight_map": {n: f for f, p in parts.items() for n in p}}
        return folder, index

    @pytest.mark.parametrize(
        ("changes", "check", "name"),
        [
            ({}, None, ""),
            ({"x": "c.safetensors"}, "index-missing-file", "c.safetensors"),
            ({"x": "../c.safetensors"}, "index-outside", "../c.safetensors"),
            ({"x": "/etc/passwd"}, "index-outside", "/etc/passwd"),
            ({"x": "a.safetensors"}, "index-missing-tensor", "x"),
        ],
    )
    def test_an_index(
        self, changes: dict[str, str], check: str | None, name: str, place: Path, tmp_path: Path
    ) -> None:
        folder, index = self.split(checkpoint(place, "W4A16"), tmp_path)
        index["weight_map"].update(changes)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert calipers.lint(folder).checks == ({check: (name,)} if check else {})

    def test_an_index_without_metadata(self, place: Path, tmp_path: Path) -> None:
        """transformers reads it before anything else."""
        folder, index = self.split(checkpoint(place, "W4A16"), tmp_path)
        del index["metadata"]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert calipers.lint(folder).checks == {"index-metadata": ("metadata",)}


class TestAgainst:
    def test_codes_of_another_row(self, place: Path, tmp_path: Path) -> None:
        roll = {f"{Q}.weight_packed": lambda t: t.roll(1, 0)}
        found = calipers.lint(
            damaged(checkpoint(place, "W4A16"), tmp_path, roll), sources(place, "W4A16")
        )
        assert found.checks == {"error-high": (Q,)}
        (weight,) = (each for each in found.weights if each.name == Q)
        assert weight.error == pytest.approx(2**0.5, rel=0.05)
        assert weight.usual_error == pytest.approx(0.11, rel=0.1)

    def test_another_model(self, place: Path) -> None:
        found = calipers.lint(checkpoint(place, "narrow"), sources(place, "W4A16"))
        assert set(found.checks) == {"other-model"}
        assert len(found.findings) == 14
        quantized = checkpoint(place, "W4A16")
        with pytest.raises(ConfigurationError, match="is quantized itself"):
            calipers.lint(quantized, quantized)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c.update(quantization_config=None), "is not quantized"),
        (lambda c: c["quantization_config"].update(quant_method="gptq"), "in the way of 'gptq'"),
        (lambda c: as_format(c["quantization_config"], "dense"), r"not quantized \(format 'dense'"),
        (lambda c: c["quantization_config"].update(format="marlin-24"), "the format 'marlin-24'"),
        (lambda c: c["quantization_config"].update(config_groups=[1]), "is damaged"),
        (lambda c: c["quantization_config"].update(ignore=["re:("]), "targets or ignore"),
    ],
)
def test_unsupported_modules_looked_at(change: Any, told: str, place: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint(place, "W4A16"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigurationError, ModelLoadError), match=told) as caught:
        calipers.lint(folder)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8_BLOCK", "NVFP4", "MXFP4", "kv", "narrow"])
def test_damage_of_any_kind_never_crashes(name: str, place: Path, tmp_path: Path) -> None:
    """Tensors of other shapes, dtypes and bytes, and configs of other values.

    Neither lint nor what shows a checkpoint, or reports on it.
    """
    chance = random.Random(name)
    sound = checkpoint(place, name)
    names = sorted(load_file(sound / "model.safetensors"))
    for number in range(12):
        chosen = [n for n in chance.sample(names, 6) if "_" in n] or names[:1]
        changes = {each: _spoilt(chance) for each in chosen}
        folder = damaged(sound, tmp_path / str(number), changes)
        if chance.random() < 0.5:
            key, value = chance.choice(_SETTINGS)
            with_config(folder, of_groups(**{key: value}))
        for look in (
            lambda: calipers.lint(folder, sources(place, name)).as_dict(),  # noqa: B023
            lambda: describe_checkpoint(folder).as_dict(),  # noqa: B023
            lambda: page_data(calipers.report(folder, findings={}).content),  # noqa: B023
        ):
            with suppress(CalipersError):
                json.dumps(look())


_SETTINGS = [
    ("num_bits", 3), ("num_bits", 16), ("num_bits", 0), ("group_size", 7), ("group_size", 100000),
    ("strategy", "token"), ("symmetric", False), ("type", "float"), ("block_structure", [3, 5]),
    ("dynamic", True), ("actorder", "group"), ("scale_dtype", "torch.int8"),
]  # fmt: skip


def _spoilt(chance: random.Random) -> Any:
    dtypes = [torch.int8, torch.uint8, torch.int32, torch.float32, torch.float8_e4m3fn, torch.int64]
    shape = tuple(chance.choice([0, 1, 2, 3, 128]) for _ in range(chance.randrange(4)))
    size = torch.Size(shape).numel()
    dtype = chance.choice(dtypes)
    noise = torch.randint(256, (size * dtype.itemsize,), dtype=torch.uint8)
    new = noise.view(dtype).view(shape)
    return chance.choice([None, new, lambda tensor: _with_noise(tensor)])


def _with_noise(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1).view(torch.uint8)
    flat.random_(256)
    return tensor


def test_a_result_in_a_notebook(place: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint(place, "W4A16"), tmp_path, {f"{Q}.weight_scale": with_value(0)})
    found = calipers.lint(folder)
    assert repr(found) == f"LintResult({folder}: 1 error; 14 quantized weights)"
    assert f"<td>scale-zero</td><td>{Q}.weight_scale</td>" in found._repr_html_()
