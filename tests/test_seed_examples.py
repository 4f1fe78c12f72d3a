"""Code as people have written it for three generations of the API, run on Calipers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from families import build, saved, token_ids
from safetensors.torch import load_file
from seed_recipes import OVERVIEW
from shell import run_here
from torch import distributed as dist
from transformers import AutoModelForCausalLM
from words import byte_tokenizer

from calipers import oneshot
from calipers.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    Observer,
    QParamsDict,
    StaticMinMaxObserver,
    flatten_for_calibration,
    fuse_weight_observers,
)


class TestFirstGeneration:
    def test_overview(self) -> None:
        args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
        observer = Observer.load_from_registry("minmax", quantization_args=args)
        x = torch.randn(64, 512)
        scale, zero_point = observer(x)
        low, high = torch.aminmax(x.view(64, 4, 128), dim=-1)
        expected = calculate_qparams(low, high, args)
        assert torch.equal(scale, expected[0])
        assert torch.equal(zero_point, expected[1])

    def test_configuration_parameters(self) -> None:
        options = {"maxshrink": 0.1, "patience": 10, "averaging_constant": 0.05, "grid": 128.0}
        args = QuantizationArgs(
            num_bits=4,
            type="int",
            symmetric=True,
            strategy="channel",
            observer="mse",
            observer_kwargs={**options, "norm": 2.0},
        )
        observer = Observer.load_from_registry(args.observer, quantization_args=args)
        assert isinstance(observer, MovingAverageMSEObserver)
        for name, value in {**options, "norm": 2.0}.items():
            assert getattr(observer, name) == value
        scale, zero_point = observer(torch.randn(8, 64))
        assert scale.shape == zero_point.shape == (8, 1)

    def test_a_running_minmax_of_ones_own(self) -> None:
        @Observer.register("running_minmax")
        class RunningMinMax(Observer):
            def __init__(
                self, quantization_args: QuantizationArgs, averaging_constant: float = 1.0
            ) -> None:
                super().__init__(quantization_args=quantization_args)
                self.lowest: dict[str, torch.Tensor] = {}
                self.highest: dict[str, torch.Tensor] = {}
                self.averaging_constant = averaging_constant

            def calculate_qparams(
                self, observed: torch.Tensor, tensor_id: Any = None
            ) -> tuple[torch.Tensor, torch.Tensor]:
                key = tensor_id or "default"
                low, high = torch.aminmax(observed)
                self.lowest[key] = torch.minimum(self.lowest.get(key, low), low)
                self.highest[key] = torch.maximum(self.highest.get(key, high), high)
                return calculate_qparams(
                    self.lowest[key], self.highest[key], self.quantization_args
                )

            def reset(self) -> None:
                super().reset()
                self.lowest, self.highest = {}, {}

        args = QuantizationArgs(num_bits=8, symmetric=False)
        mine = Observer.load_from_registry("running_minmax", quantization_args=args)
        static = Observer.load_from_registry("static_minmax", base_name="input", args=args)
        for _ in range(3):
            x = torch.randn(2, 3, 8)
            scale, zero_point = mine(x)
            expected_scale, expected_zero = static(x)
            assert torch.equal(scale, expected_scale)
            assert torch.equal(zero_point, expected_zero)
        mine.reset()
        assert not mine.has_statistics
        scale, _ = mine(torch.ones(1, 2))
        assert scale.item() == torch.tensor(1 / 255).item()

    def test_hooks_that_calibrate_an_input(self) -> None:
        def initialize(module: torch.nn.Module, base_name: str) -> None:
            args = getattr(module.quantization_scheme, f"{base_name}_activations")
            if args and not args.dynamic:
                observer = Observer.load_from_registry(
                    args.observer or "minmax", quantization_args=args
                )
                module.register_module(f"{base_name}_observer", observer)
                module.register_parameter(
                    f"{base_name}_scale", torch.nn.Parameter(torch.zeros(1), requires_grad=False)
                )

        def calibrate(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            scale, zero_point = module.input_observer(inputs[0])
            assert zero_point.item() == 0
            module.input_scale.data.copy_(scale)

        linear = torch.nn.Linear(8, 4)
        linear.quantization_scheme = QuantizationScheme(
            targets=["Linear"], input_activations=QuantizationArgs(num_bits=8)
        )
        initialize(linear, "input")
        handle = linear.register_forward_pre_hook(calibrate)
        x = torch.randn(5, 8)
        linear(x)
        handle.remove()
        torch.testing.assert_close(linear.input_scale.data, x.abs().max().reshape(1) / 127.5)


class TestCurrentGeneration:
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )

    def test_constructors(self) -> None:
        for kind in (MemorylessMinMaxObserver, StaticMinMaxObserver, MinMaxObserver):
            observer = kind("weight", self.args)
            qparams: QParamsDict = observer(torch.randn(4, 32)).get_qparams()
            assert set(qparams) == {"scale", "zero_point", "global_scale"}
            assert qparams["global_scale"] is not None
            assert qparams["scale"].shape == (4, 2)
            assert observer.get_statistics().keys() >= {"min_vals", "max_vals"}

    def test_weights_that_run_fused(self) -> None:
        attention = torch.nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = torch.nn.Linear(32, 8)
            layer.weight_observer = Observer.load_from_registry(
                "memoryless_minmax", base_name="weight", args=self.args
            )
            setattr(attention, name, layer)
        fuse_weight_observers(attention)
        for layer in attention.children():
            layer.weight_observer(layer.weight)
        found = [m.weight_observer.get_qparams()["global_scale"] for m in attention.children()]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[1], found[2])

    def test_importance(self) -> None:
        linear = torch.nn.Linear(32, 8)
        gatherer = IMatrixMSEObserver("weight", QuantizationArgs(num_bits=4, group_size=16))
        gatherer.attach(linear)
        linear(torch.randn(10, 32))
        gatherer.detach(linear)
        observer = IMatrixMSEObserver(
            base_name="weight", args=QuantizationArgs(num_bits=4, group_size=16), strict=True
        )
        observer.attach(linear)
        assert observer(linear.weight).get_qparams()["scale"].shape == (8, 2)
        observer.detach(linear)

    def test_an_observer_of_ones_own(self) -> None:
        class Largest(Observer):
            _act_sync_dict = {"max_vals": dist.ReduceOp.MAX}  # noqa: RUF012

            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                highest = observed.abs().amax((0, -1))
                if hasattr(self, "max_vals"):
                    highest = torch.maximum(highest, self.max_vals)
                self.min_vals, self.max_vals = -highest, highest

        args = QuantizationArgs(num_bits=8)
        observer = Largest(base_name="output", args=args)
        x = torch.randn(2, 4, 8)
        assert flatten_for_calibration(x, "output", args).shape == (8, 1, 8)
        assert observer.sync_activation_stats() == []
        torch.testing.assert_close(
            observer(x).get_qparams()["scale"], x.abs().max().reshape(1) / 127.5
        )


RECIPE = OVERVIEW.format(modifier="GPTQModifier")


class TestRecipe:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        folder = saved(build("llama", torch.bfloat16), tmp_path / "model")
        byte_tokenizer(bos=True, eos=True).save_pretrained(folder)
        return folder

    def test_in_python(self, model: Path, tmp_path: Path) -> None:
        """Scales are those without error feedback, fitted to codes that err less together."""
        stored = {}
        not_swept = RECIPE.replace("Modifier:\n", "Modifier:\n      sweeps: 0\n")
        for method, recipe in ((None, RECIPE), ("gptq", RECIPE), ("rtn", RECIPE), (0, not_swept)):
            how: Any = {"method": method or None, "num_calibration_samples": 8, "progress": False}
            folder = tmp_path / str(method)
            oneshot(model, recipe, token_ids(), output_dir=folder, **how)
            stored[method] = load_file(folder / "model.safetensors")
        first = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(*(stored[way][f"{first}_scale"] for way in (0, "rtn")))
        assert not torch.equal(*(stored[way][f"{first}_scale"] for way in (0, None)))
        assert not torch.equal(*(stored[way][f"{first}_packed"] for way in (0, "rtn")))
        scales = (stored[way][f"{first}_scale"] for way in (None, "rtn"))
        torch.testing.assert_close(*scales, rtol=0.25, atol=0)
        assert not torch.equal(*(stored[way][f"{first}_packed"] for way in (None, "rtn")))
        for name, tensor in stored[None].items():
            assert torch.equal(tensor, stored["gptq"][name])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "None")
        assert loaded(token_ids()).logits.isfinite().all()

    def test_on_the_command_line(self, model: Path, tmp_path: Path) -> None:
        recipe, text, out = (tmp_path / name for name in ("recipe.yaml", "text.txt", "out"))
        recipe.write_text(RECIPE)
        text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
        words = ("quantize", str(model), "--recipe", str(recipe), "--data", str(text))
        done = run_here(*words, "--seq-len", "64", "--samples", "20", "-o", str(out))
        assert done.exit_code == 0, done.stderr
        assert "memoryless_mse(maxshrink=0.1, patience=10, grid=128.0, norm=2.0)" in done.stdout
        assert "GPTQModifier" in (out / "recipe.yaml").read_text()
