"""Every observer that recipes of llm-compressor 0.14 name is here, as it is defined there."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4

from calipers.cli.observer_info import ObserverInfo
from calipers.observers import (
    NVFP4ExpandedIMatrixObserver,
    NVFP4ExpandedMSEObserver,
    Observer,
)

REGISTERED = {
    *("memoryless-minmax", "static-minmax", "minmax", "memoryless-mse", "mse", "imatrix-mse"),
    *("nvfp4-expanded-mse", "nvfp4-expanded-imatrix", "fouroversix"),
}
"""What ``Observer.registered_names()`` returns in llmcompressor 0.14.0.1."""


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_it_loads_and_observes(name: str) -> None:
    for spelling in (name, name.replace("-", "_")):
        observer = Observer.load_from_registry(spelling, base_name="input", args=nvfp4(16))
        assert issubclass(Observer.get_value_from_registry(spelling), Observer)
        assert observer.registered_name().replace("_", "-") in REGISTERED
    weight = Observer.load_from_registry(name, base_name="weight", args=nvfp4(16))
    assert weight.options == type(weight.options)()


def test_fouroversix_is_the_expanded_search() -> None:
    assert Observer.get_value_from_registry("fouroversix") is NVFP4ExpandedMSEObserver
    told = ObserverInfo.of(NVFP4ExpandedMSEObserver)
    assert told.aliases == ("fouroversix",)
    # A group that 4 fits and 6 does not: of the values that it holds, 4 is the largest code.
    weight = torch.tensor([[4.0, 3.0, 2.0, 1.5, 1.0, 0.5, -4.0, -3.0] * 2, [6.0, 4.0] * 8])
    qparams = Observer.load_from_registry("fouroversix", args=nvfp4(16))(weight).get_qparams()
    effective = qparams["scale"].float() / qparams["global_scale"]
    torch.testing.assert_close(effective, torch.ones(2, 1), rtol=0.04, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("args", [nvfp4(16), QuantizationArgs(num_bits=4, group_size=16)])
def test_expanded_imatrix(args: QuantizationArgs, dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(64, 5, bias=False, dtype=dtype)
    x = (torch.randn(200, 64) * torch.logspace(-1.5, 0.7, 64)).to(dtype)
    observer = NVFP4ExpandedIMatrixObserver("weight", args, strict=True)
    observer.attach(linear)
    linear(x)
    observer.detach(linear)
    weight = linear.weight.detach()
    observer(weight)

    importance = x.double().square().mean(0)
    importance = (importance / importance.mean()).numpy()
    low, high = (end.float() * 1.8 for end in reference.extrema(weight, "weight", args))
    factors = [1 - i / 200 for i in range(112)]  # from 1.8 down to 0.8 times the range
    errors = reference.candidate_errors(
        weight, "weight", args, low, high, factors, 2.4, importance, dtype
    )
    ratio = observer.max_vals.double() / high.double()
    chosen = (ratio.reshape(-1, 1) - torch.tensor(factors)).abs().argmin(1).numpy()
    if dtype == torch.float32:
        assert (errors[chosen, np.arange(len(chosen))] <= errors.min(0) * (1 + 1e-5)).all()
        assert (chosen == errors.argmin(0)).mean() > 0.9
    else:  # neighbouring factors may be one number in bfloat16
        ends = [(high.reshape(-1) * f).to(dtype) for f in torch.tensor(factors)[errors.argmin(0)]]
        best = torch.stack([end[i] for i, end in enumerate(ends)])
        assert (observer.max_vals.reshape(-1) == best).double().mean() > 0.9
    assert (np.array(factors)[chosen] * 1.8 > 1).any()
