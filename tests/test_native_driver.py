"""`make check-arm` compiles `tests/native` for ARM; here, that it fits the kernels as they are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src/calipers/kernels/native/cpp"
COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
def test_the_driver_is_valid() -> None:
    options = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    options += ["-DCALIPERS_ISA=generic", f"-I{NATIVE}"]
    command = [str(COMPILER), *options, str(ROOT / "tests/native/check.cpp")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_driver_checks_every_kernel() -> None:
    struct = (NATIVE / "jobs.h").read_text().split("struct Kernels {")[1].split("};")[0]
    kernels = re.findall(r"Kernel<\w+> (\w+);", struct)
    driver = (ROOT / "tests/native/check.cpp").read_text()
    assert len(kernels) == 12
    assert [kernel for kernel in kernels if f'{{"{kernel}", ' not in driver] == []


@pytest.mark.skipif(COMPILER is None, reason="there is no compiler")
def test_an_arena_hands_out_what_it_measures_and_guards_it(tmp_path: Path) -> None:
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
    command = [str(COMPILER), *options, str(ROOT / "tests/native/arena.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "arena")], check=True)
    result = subprocess.run([str(tmp_path / "arena")], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "right\n")
