"""Nothing is found in a sound checkpoint, whoever wrote it, and errors are those of its values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import massive
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from families import saved
from linting import DOWN, RECIPES, Q, checkpoint, damaged, sources, with_value
from safetensors.torch import load_file

import calipers
from calipers import registry
from calipers.checkpoint import stored_module
from calipers.checkpoint.stored_module import StoredModule
from calipers.linting import Finding
from calipers.linting.check import CHECKS, Check
from calipers.linting.codes import count_codes

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_sound_checkpoint(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found, and errors are those of codes times scales, as quantization noted them."""
    monkeypatch.setattr(stored_module, "_TILE", 3000)  # several parts of each weight
    folder, source = checkpoint(place, name), sources(place, name)
    found = calipers.lint(folder, against=source)
    assert [str(each) for each in found.findings] == []
    assert len(found.weights) == (4 if name == "mixed" else 14)
    stored, original = (
        load_file(folder / "model.safetensors"),
        load_file(source / "model.safetensors"),
    )
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    noted = json.loads((folder / "calipers.json").read_text())["weight_errors"]
    assert {weight.name: weight.error for weight in found.weights} == pytest.approx(noted, rel=1e-6)
    for weight in found.weights[:: 5 if len(found.weights) > 4 else 1]:
        values = decompressed(weight.name, stored, config).double()
        exact = original[f"{weight.name}.weight"].double()
        assert weight.shape == exact.shape
        expected = ((values - exact).norm() / exact.norm()).item()
        assert weight.error == pytest.approx(expected, rel=1e-6)


def decompressed(name: str, stored: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    """What compressed-tensors makes of a weight if nothing is rounded to 16 bits behind it."""
    groups = [QuantizationScheme.model_validate(each) for each in config["config_groups"].values()]
    scheme = next((g for g in groups if any(name.endswith(t[-6:]) for t in g.targets)), groups[0])
    form = CompressionFormat(scheme.format or config["format"])
    state = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in stored.items()
        if key.startswith(f"{name}.")
    }
    scale = state["weight_scale"]
    if form is CompressionFormat.nvfp4_pack_quantized:  # always rounded by the library
        rows, half = state["weight_packed"].shape
        codes = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half).double()
        scale = scale.double() / state["weight_global_scale"].double()
        return codes * scale.repeat_interleave(16, dim=1)
    if scale.dtype == torch.bfloat16:
        state["weight_scale"] = scale.float()
    found: torch.Tensor = BaseCompressor.get_value_from_registry(form.value).decompress(
        state, scheme
    )["weight"]
    return found


class TestOtherWriters:
    """What llm-compressor and older versions of it write."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC"])
    def test_scales_of_other_dtypes(
        self, name: str, dtype: torch.dtype, place: Path, tmp_path: Path
    ) -> None:
        folder = checkpoint(place, name)
        scales = [n for n in load_file(folder / "model.safetensors") if n.endswith("_scale")]
        changes = dict.fromkeys(scales, lambda scale: scale.to(dtype))
        found = calipers.lint(damaged(folder, tmp_path, changes), sources(place, name))
        assert found.findings == ()
        assert all(weight.error is not None and weight.error < 0.13 for weight in found.weights)

    def test_zero_points_of_a_symmetric_scheme(self, place: Path, tmp_path: Path) -> None:
        """Older versions stored them; all are 0."""
        zeros = {f"{Q}.weight_zero_point": torch.zeros(128, 1, dtype=torch.int8)}
        found = calipers.lint(damaged(checkpoint(place, "W8A8"), tmp_path, zeros))
        assert [(each.severity, each.check) for each in found.findings] == [
            ("warning", "zero-point-symmetric")
        ]

    def test_keys_and_values_as_outputs_of_projections(self, place: Path, tmp_path: Path) -> None:
        changes: dict[str, Any] = {}
        for layer in (0, 1):
            for side in ("k", "v"):
                changes[f"model.layers.{layer}.self_attn.{side}_scale"] = None
                projection = f"model.layers.{layer}.self_attn.{side}_proj"
                changes[f"{projection}.output_scale"] = torch.full((1,), 0.03)
        assert calipers.lint(damaged(checkpoint(place, "kv"), tmp_path, changes)).findings == ()

    def test_only_the_format_of_all(self, place: Path, tmp_path: Path) -> None:
        """Groups had no format of their own, scales no dtype, and there were fewer keys."""

        def older(config: dict[str, Any]) -> None:
            for group in config["config_groups"].values():
                del group["format"]
                group["weights"].pop("scale_dtype", None)
                group["weights"].pop("zp_dtype", None)
            config.pop("version", None)

        for name in ("W4A16", "NVFP4"):
            folder = damaged(checkpoint(place, name), tmp_path / name, config=older)
            assert calipers.lint(folder).findings == ()

    def test_an_unknown_architecture(self, place: Path, tmp_path: Path) -> None:
        folder = damaged(checkpoint(place, "W4A16"), tmp_path, {f"{Q}.weight_scale": with_value(0)})
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"model_type": "nobody_knows"}
        file.write_text(json.dumps(config))
        found = calipers.lint(folder, sources(place, "W4A16"))
        assert found.checks["scale-zero"] == (f"{Q}.weight_scale",)
        assert found.counts == {"error": 1, "warning": 0, "note": 1}
        assert found.checks["model-unknown"] == ("config.json",)


def test_what_was_lost_is_read_from_the_notes(tmp_path: Path) -> None:
    """A static input that is lost can be seen in no tensor; quantize has said so, and lint does."""
    model = saved(massive.massive_llama(torch.bfloat16), tmp_path / "model")
    calipers.oneshot(model, "W8A8_STATIC", massive.samples(), output_dir=tmp_path / "out")
    notes = json.loads((tmp_path / "out" / "calipers.json").read_text())
    lost = notes["costs"][massive.MASSIVE]["tensors"]["input"]
    assert lost["typical_error"] > 0.99
    found = calipers.lint(tmp_path / "out")
    assert found.checks == {"activation-loss": (f"{massive.MASSIVE}.input",)}
    assert found.findings[0].problem.startswith("is static, and loses 100% of all but its larg")
    assert f"reach {lost['largest']:.4g}, and its range ends at" in found.findings[0].problem
    for damage in ("{", '{"costs": {"a": {"tensors": {"input": 1}}}}', '{"costs": 3}'):
        (tmp_path / "out" / "calipers.json").write_text(damage)
        assert calipers.lint(tmp_path / "out").checks == {"notes-damaged": ("calipers.json",)}


def test_columns_in_another_order(place: Path, tmp_path: Path) -> None:
    """A g_idx that says what is so anyhow changes nothing."""
    order = (torch.arange(256) // 128).int()
    source, folder = sources(place, "W4A16"), checkpoint(place, "W4A16")
    found = calipers.lint(damaged(folder, tmp_path, {f"{DOWN}.weight_g_idx": order}), source)
    assert found.findings == ()
    assert set(found.weights) == set(calipers.lint(folder, source).weights)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [64, 37])
def test_codes_are_counted(bits: int, columns: int) -> None:
    """Packed codes, as unpacking them tells."""
    torch.manual_seed(bits)
    words = -(-columns * bits // 32)
    packed = torch.randint(-(1 << 31), (1 << 31) - 1, (11, words)).int()
    args = QuantizationArgs(num_bits=bits, strategy="channel")
    found = count_codes(packed, CompressionFormat.pack_quantized, args, (11, columns))
    codes = unpack_from_int32(packed, bits, torch.Size((11, columns)))
    half = 1 << (bits - 1)
    ends = ((codes == -half) | (codes == half - 1)).float().mean().item()
    assert found[:4] == (codes.numel(), len(codes.unique()), 2 * half, pytest.approx(ends))


class NamesCheck(Check):
    """A check that brings nothing but one file: names of projections that are too long."""

    def of_module(self, module: StoredModule) -> Iterator[Finding]:
        if len(module.name) > len(Q):
            yield Finding("warning", "name-long", module.name, "has a long name", "Shorten it.")


def test_a_check_of_somebody_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("names", f"{__name__}:NamesCheck", CHECKS.group)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] * (group == CHECKS.group))
    monkeypatch.setattr(CHECKS, "_has_entry_points", False)
    monkeypatch.setattr(CHECKS, "_sources", dict(CHECKS._sources))
    found = calipers.lint(checkpoint(place, "W4A16"))
    assert found.counts == {"error": 0, "warning": len(found.checks["name-long"]), "note": 0}
    assert all(len(name) > len(Q) for name in found.checks["name-long"])
    assert CHECKS.names() == ["files", "tensors", "values", "codes", "names"]
