from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MEASURE = """
import resource, torch
from compressed_tensors.quantization import QuantizationArgs
from calipers.observers import Observer

FP8 = torch.float8_e4m3fn
ARGS = [
    QuantizationArgs(num_bits=4, group_size=128),
    QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=FP8
    ),
    QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
]

def search(weight, args):
    # Memory does not depend on the number of candidates; two are enough.
    Observer.load_from_registry(
        "memoryless_mse", base_name="weight", args=args, maxshrink=0.02, norm=2.0
    )(weight).get_qparams()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for args in ARGS:
    search(torch.randn(256, 256).bfloat16(), args)
weight = torch.randn(256, 8192).bfloat16().repeat(32, 1)
before = peak()
for args in ARGS:
    search(weight, args)
    print(peak() - before)
"""


def test_memory_is_bounded() -> None:
    """At 16,384 × 16,384 the limit is 1 GiB; a quarter of the values, a quarter of the limit."""
    # Beside a busy process, threads that wait by spinning make this ten times slower.
    result = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    peaks = [int(line) for line in result.stdout.split()]
    assert len(peaks) == 3
    assert max(peaks) < 2**28
