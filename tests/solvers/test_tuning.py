from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from calipers.observers import Observer
from calipers.solvers.tuning import FixedCodes, Vector, divergence


def weights_of(scheme: str) -> QuantizationArgs:
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    assert args is not None
    return args


ARGS = {
    "int3 group": QuantizationArgs(num_bits=3, strategy="group", group_size=32),
    "int4 group asym": weights_of("W4A16_ASYM"),
    "int8 channel": weights_of("W8A8"),
    "int8 channel asym": QuantizationArgs(num_bits=8, strategy="channel", symmetric=False),
    "int4 tensor": QuantizationArgs(num_bits=4, strategy="tensor"),
    "fp8 block": weights_of("FP8_BLOCK"),
    "fp8 channel": weights_of("FP8_DYNAMIC"),
    "nvfp4": weights_of("NVFP4A16"),
}


def solved(args: QuantizationArgs, dtype: torch.dtype) -> tuple[FixedCodes, torch.Tensor]:
    """Return a quantized weight, and what fake quantization made of it before."""
    weight = torch.randn(160, 256).to(dtype)
    qparams = Observer.load_from_registry("minmax", base_name="weight", args=args)(
        weight
    ).get_qparams()
    return FixedCodes.of(weight, args, **qparams), fake_quantize(weight, args=args, **qparams)


def rounds_twice(name: str, dtype: torch.dtype) -> bool:
    """Whether a weight, and then its quotient by a scale, take more digits than there are."""
    return dtype == torch.bfloat16 and name.startswith("int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARGS)
class TestWeightByItsScales:
    def test_is_as_before_without_a_change(self, name: str, dtype: torch.dtype) -> None:
        codes, before = solved(ARGS[name], dtype)
        again = codes.frozen(codes.start(torch.Generator().manual_seed(0)))
        if rounds_twice(name, dtype):
            assert float((again != before).float().mean()) < 0.02
        else:
            assert torch.equal(again, before)
        near = codes.weight(codes.start()).detach()
        torch.testing.assert_close(near, before.float(), rtol=2**-7, atol=0)

    def test_keeps_its_codes(self, name: str, dtype: torch.dtype) -> None:
        codes, _ = solved(ARGS[name], dtype)
        change = torch.randn_like(codes.start()) * 0.2
        weight, scale = codes.stored(change)
        others = {"zero_point": codes.zero_point, "global_scale": codes.global_scale}
        again = FixedCodes.of(weight, codes.args, scale=scale, **others).multiples
        off = (again.float() - codes.multiples.float()).abs()
        if rounds_twice(name, dtype):
            assert float(off.max()) <= 1
            assert float(off.mean()) < 0.05
        else:
            assert float(off.max()) == 0
        assert weight.dtype == dtype
        assert torch.equal(scale.float(), codes.scale(change).detach())


def test_scales_have_their_gradient_where_nothing_is_rounded() -> None:
    codes, _ = solved(ARGS["int3 group"], torch.float32)
    along = torch.randn(160, 256)
    change = (torch.randn_like(codes.start()) * 0.1).requires_grad_()
    (gradient,) = torch.autograd.grad((codes.weight(change) * along).sum(), change)
    step = torch.zeros_like(change)
    for place in ((0, 0), (7, 3), (159, 7)):
        step.zero_()[place] = 1e-2
        with torch.no_grad():
            ends = [(codes.weight(change + s * step) * along).double().sum() for s in (1, -1)]
        slope = float(ends[0] - ends[1]) / 2e-2
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-2, abs=1e-3)


def test_vectors_are_rounded_as_they_are_stored() -> None:
    vector = Vector(torch.tensor([1.0, -2.0, 0.0]).bfloat16())
    change = torch.tensor([1e-4, 0.1, 0.1], requires_grad=True)
    value = vector.value(change)
    assert torch.equal(value, vector.stored(change).float())
    assert float(value[0].detach()) == 1.0
    (gradient,) = torch.autograd.grad(value.sum(), change)
    torch.testing.assert_close(gradient, torch.full((3,), (5 / 3) ** 0.5))


@pytest.mark.parametrize("name", ["int3 group", "nvfp4"])
def test_scales_begin_anywhere_between_two_stored_ones(name: str) -> None:
    """Steps that are small against those of stored values change as many as they are long."""
    codes, _ = solved(ARGS[name], torch.bfloat16)
    start = codes.start(torch.Generator().manual_seed(0))
    assert torch.equal(codes.scale(start), codes.before.float())
    ulp = {"int3 group": 2**-8, "nvfp4": 2**-4}[name]  # to twice that, in terms of a value
    changed = (codes.scale(start + ulp / 8) != codes.before.float()).float().mean()
    assert 1 / 16 < float(changed) < 1 / 6


def test_a_vector_of_zeros_can_be_tuned() -> None:
    zeros = Vector(torch.zeros(4))
    assert torch.equal(zeros.stored(torch.full((4,), 0.5)), torch.full((4,), 0.5))


def test_divergence_is_that_of_two_distributions() -> None:
    teacher, student = torch.randn(5, 7).double(), torch.randn(5, 7).double()
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = float((p * (p / q).log()).sum())
    assert float(divergence(teacher, student)) == pytest.approx(expected, rel=1e-5)
