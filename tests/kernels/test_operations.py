"""A backend is chosen for what it accepts, and everything else is left to the next one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import backends_in_use
from torch import Tensor

from calipers import registry
from calipers.errors import CalipersWarning, ConfigurationError
from calipers.kernels import describe, operations
from calipers.kernels.operations import (
    BACKENDS,
    Accepts,
    Backend,
    Declined,
    Status,
    add_backend,
    chosen_backends,
    remove_backend,
)
from calipers.kernels.reductions import extrema, sum_of_squares

TOKENS = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
TOY = Backend("toy", Accepts(dtypes=(torch.float64, torch.float16)))


@pytest.fixture
def engine() -> None:
    """Backends are chosen by the tests themselves."""


@sum_of_squares.register(TOY)
def _of_the_toy(tokens: Tensor, mask: Tensor | None = None) -> Tensor | Declined:
    if len(tokens) == 1:
        return Declined("one token")
    if len(tokens) == 5:
        raise RuntimeError("the toy is broken")
    assert mask is None
    return torch.full((tokens.shape[1],), -1.0)


@pytest.fixture
def toy() -> Iterator[Backend]:
    add_backend(TOY)
    yield TOY
    remove_backend("toy")


@pytest.mark.usefixtures("toy")
class TestABackendInOneFile:
    def test_it_is_chosen_for_what_it_accepts(self) -> None:
        assert sum_of_squares(TOKENS.double()).tolist() == [-1, -1]
        assert sum_of_squares.backends[0] == "toy"
        assert sum_of_squares(TOKENS).tolist() == [10, 20]
        assert sum_of_squares(TOKENS.double()[:0]).tolist() == [0, 0]

    def test_an_operation_that_it_does_not_have_is_left_to_others(self) -> None:
        assert "toy" not in extrema.backends
        assert extrema(TOKENS.double()[None, None]).max_vals.item() == 4

    def test_what_it_declines_is_left_to_others(self) -> None:
        assert sum_of_squares(TOKENS[1:].half()).tolist() == [9, 16]

    def test_what_it_raises_is_raised(self) -> None:
        with pytest.raises(RuntimeError, match="the toy is broken"):
            sum_of_squares(torch.ones(5, 1).half())

    def test_each_can_be_asked_for(self) -> None:
        assert sum_of_squares.using("toy")(TOKENS).tolist() == [-1, -1]
        assert sum_of_squares.using("torch")(TOKENS.double()).tolist() == [10, 20]
        with pytest.raises(ConfigurationError, match=r"sum_of_squares has no backend 'ty'.*toy"):
            sum_of_squares.using("ty")

    @pytest.mark.parametrize(
        ("names", "found"),
        [("torch", 10), ("toy", -1), ("toy,torch", -1), ("torch,toy", 10), (" TOY ", -1), ("", -1)],
    )
    def test_the_environment_limits_the_choice(self, names: str, found: int) -> None:
        with backends_in_use(names):
            assert int(sum_of_squares(TOKENS.half())[0]) == found

    def test_it_is_reported(self) -> None:
        assert describe().operations["sum_of_squares"][0] == "toy"
        assert "toy: float64, float16 on any device; it is registered" in str(describe())


def test_what_was_added_can_be_taken_back() -> None:
    add_backend(TOY)
    remove_backend("toy")
    assert "toy" not in sum_of_squares.backends
    assert sum_of_squares(TOKENS.double()).tolist() == [10, 20]


@pytest.mark.parametrize("name", ["nativ", "trch", "toy"])
def test_an_unknown_backend_is_refused(name: str) -> None:
    with backends_in_use(f"torch,{name}"), pytest.raises(ConfigurationError) as it:
        sum_of_squares(TOKENS)
    assert f"CALIPERS_BACKEND=torch,{name}: there is no backend '{name}'" in str(it.value)
    assert "Allowed: torch, native" in str(it.value)


class TestABackendThatCannotRun:
    status = Status(
        False, "its library is missing", "The toy does not run: its library is missing."
    )

    @pytest.fixture(autouse=True)
    def _broken(self) -> Iterator[None]:
        add_backend(Backend("broken", Accepts(dtypes=(torch.float64,)), status=lambda: self.status))
        yield
        remove_backend("broken")

    def test_one_warning_for_what_it_would_have_run(self, recwarn: Any) -> None:
        operations._warn_once.cache_clear()
        sum_of_squares(TOKENS)
        assert not recwarn
        with pytest.warns(CalipersWarning, match="its library is missing"):
            assert sum_of_squares(TOKENS.double()).tolist() == [10, 20]
        assert sum_of_squares(TOKENS.double()).tolist() == [10, 20]
        assert "broken" not in sum_of_squares.backends

    def test_named_in_the_environment_it_is_an_error(self) -> None:
        text = "CALIPERS_BACKEND=broken: the backend broken cannot be used here: its library"
        with backends_in_use("broken"), pytest.raises(ConfigurationError, match=text):
            sum_of_squares(TOKENS)


def install(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    """Let backends be found anew, with those of these entry points."""
    monkeypatch.setattr(registry, "entry_points", lambda group: entries * (group == BACKENDS.group))
    monkeypatch.setattr(BACKENDS, "_has_entry_points", False)
    monkeypatch.setattr(BACKENDS, "_sources", dict(BACKENDS._sources))
    monkeypatch.setattr(BACKENDS, "_conflicts", {})


PLUGIN = """
from calipers.kernels.operations import Accepts, Backend
BACKEND = Backend("{name}", Accepts(), package="{name}")
"""
PLUGIN_REDUCTIONS = """
from {name} import BACKEND
from calipers.kernels.reductions import sum_of_squares

@sum_of_squares.register(BACKEND)
def natively(tokens, mask=None):
    return "from the plug-in"
"""


def test_a_package_brings_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "abacus"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN.format(name="abacus"))
    (package / "reductions.py").write_text(PLUGIN_REDUCTIONS.format(name="abacus"))
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, EntryPoint("Abacus", "abacus:BACKEND", "calipers.backends"))
    with backends_in_use("ABACUS,native"):
        assert [each.name for each in chosen_backends()][:1] == ["abacus"]
    with backends_in_use(""):
        assert chosen_backends()[0].name == "abacus"
        assert "abacus.reductions" not in sys.modules
        assert sum_of_squares(TOKENS) == "from the plug-in"
        assert extrema(TOKENS[None, None]).max_vals.item() == 4


@pytest.mark.parametrize("value", ["nowhere:BACKEND", "math:pi"])
def test_a_plug_in_that_cannot_be_loaded(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("astray", value, "calipers.backends"))
    with backends_in_use(""):
        with pytest.warns(
            CalipersWarning, match="runs without it: backend 'astray' .* cannot be used"
        ):
            assert sum_of_squares(TOKENS).tolist() == [10, 20]
        assert sum_of_squares(TOKENS).tolist() == [10, 20]


@pytest.mark.parametrize(("name", "first"), [("astray", r"one\.B"), ("native", "calipers.kernels")])
def test_a_name_stands_for_one_backend(
    name: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, EntryPoint("astray", "one:B", "g"), EntryPoint(name, "other:B", "g"))
    text = rf"'{name}' stands for two backends: {first}.*, and other\.B .*\. Uninstall one"
    with backends_in_use(""), pytest.raises(ConfigurationError, match=text):
        sum_of_squares(TOKENS)
    with backends_in_use("torch"):  # others can be used
        assert sum_of_squares(TOKENS).tolist() == [10, 20]


@pytest.mark.slow
def test_an_import_loads_no_backend() -> None:
    script = (
        "import sys, calipers.kernels.operations as o; print(len(o.operations()) > 10, "
        "[name for name in sys.modules if name.startswith('calipers.kernels.native') "
        "or name == 'calipers.kernels._native'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "True []\n", result.stderr
