from __future__ import annotations

import json
import os
import platform

import pytest
import torch
from shell import run, run_here

from calipers import __version__
from calipers.kernels import describe


@pytest.mark.slow
def test_the_doctor_tells_versions_kernels_and_machine() -> None:
    unset = dict.fromkeys(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))
    done = run("doctor", env={"CALIPERS_NATIVE": "0", **unset})
    assert (done.returncode, done.stderr) == (0, "")
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1] != " ")
    assert facts["calipers"].rstrip() == __version__
    assert facts["torch"].rstrip() == torch.__version__
    assert facts["python"].startswith(platform.python_version())
    assert facts["kernels"].rstrip() == "native: not used, CALIPERS_NATIVE=0 is set"
    assert facts["devices"].startswith("cpu")
    assert facts["threads"].rstrip() == "1 (OMP_WAIT_POLICY=PASSIVE)"
    assert "free in" in facts["disk"]


def test_the_same_as_data() -> None:
    told = json.loads(run_here("doctor", "--json").stdout)
    assert told["packages"]["calipers"] == __version__
    backends = {each["name"]: each for each in told["kernels"]["backends"]}
    assert backends["native"]["is_usable"] == bool(describe().instruction_set)
    assert told["kernels"]["operations"] == {
        name: list(each) for name, each in describe().operations.items()
    }
    assert told["cores"] == os.cpu_count()
    assert told["disk"]["free"] > 0
    assert 0 < told["memory"]["free"] <= told["memory"]["total"]


@pytest.mark.slow
def test_a_choice_of_backends_is_told() -> None:
    done = run("doctor", env={"CALIPERS_BACKEND": "torch"})
    assert "kernels" in done.stdout
    assert "torch: everything else (CALIPERS_BACKEND=torch is set)" in done.stdout
    error = json.loads(run("doctor", "--json", env={"CALIPERS_BACKEND": "ntive"}).stderr)["error"]
    assert error["type"] == "ConfigurationError"
    assert "there is no backend 'ntive'. Did you mean 'native'?" in error["message"]
    assert error["message"].endswith("Allowed: torch, native.")


@pytest.mark.slow
def test_a_wrong_choice_of_kernels_is_told() -> None:
    done = run("doctor", "--json", env={"CALIPERS_NATIVE": "avx3000"})
    if describe().instruction_set is None:
        return
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, done.stdout, error["exit_code"]) == (2, "", 2)
    assert error["type"] == "ConfigurationError"
    assert error["message"].startswith("CALIPERS_NATIVE=avx3000: this machine has ")
