"""Threads that wait for each other sleep, unless the user wants otherwise."""

from __future__ import annotations

import json
import os

import pytest
import torch
from shell import run_here

from calipers.cli.main import WAITING, _let_waiting_threads_sleep


@pytest.mark.parametrize("chosen", [None, *WAITING])
def test_what_the_user_chose_stays(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(chosen, "17")
    _let_waiting_threads_sleep()
    now = {name: os.environ[name] for name in WAITING if name in os.environ}
    assert now == ({"OMP_WAIT_POLICY": "PASSIVE"} if chosen is None else {chosen: "17"})
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)


def test_the_doctor_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    number = torch.get_num_threads()
    assert (
        f"{number} (they spin while they wait; OMP_WAIT_POLICY=PASSIVE" in run_here("doctor").stdout
    )
    monkeypatch.setenv("GOMP_SPINCOUNT", "9")
    assert f"{number} (GOMP_SPINCOUNT=9)" in run_here("doctor").stdout
    told = json.loads(run_here("doctor", "--json").stdout)["threads"]
    assert told == {"number": number, "waiting": {"GOMP_SPINCOUNT": "9"}}
