from __future__ import annotations

import os
import subprocess
import sys

import pytest

MEASURE = """
import resource, torch
from compressed_tensors.quantization import QuantizationArgs
from calipers.observers import Observer

args = QuantizationArgs({kwargs})
def search(weight):
    # Memory does not depend on the number of candidates; two are enough.
    Observer.load_from_registry(
        "memoryless_mse", base_name="weight", args=args, maxshrink=0.02, norm=2.0
    )(weight).get_qparams()

search(torch.randn(256, 256).bfloat16())
weight = torch.empty({size}, {size}, dtype=torch.bfloat16)
weight[:256] = torch.randn(256, {size})
for row in range(256, {size}, 256):
    weight[row : row + 256] = weight[:256]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
search(weight)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    "kwargs",
    [
        "num_bits=4, group_size=128",
        "num_bits=4, type='float', strategy='tensor_group', group_size=16,"
        " scale_dtype=torch.float8_e4m3fn",
        "num_bits=8, type='float', strategy='block', block_structure=[128, 128]",
    ],
)
def test_memory_is_bounded(kwargs: str) -> None:
    """At 16,384 × 16,384 the limit is 1 GiB; a quarter of the values, a quarter of the limit."""
    script = MEASURE.format(kwargs=kwargs, size=8192)
    # Beside a busy process, threads that wait by spinning make this ten times slower.
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert int(result.stdout) < 2**28
