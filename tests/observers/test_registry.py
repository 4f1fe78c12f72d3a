from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import ConfigurationError
from calipers.observers import MinMaxObserver, Observer, StaticMinMaxObserver

PLUGIN = """
from calipers.observers import StaticMinMaxObserver

class Mine(StaticMinMaxObserver):
    pass

class NotMine:
    pass
"""


@pytest.mark.parametrize("spelling", ["minmax", "MinMax", " MINMAX"])
def test_case_does_not_matter(spelling: str) -> None:
    assert Observer.get_value_from_registry(spelling) is MinMaxObserver


@pytest.mark.parametrize("spelling", ["static_minmax", "static-minmax", "Static MinMax"])
def test_separators_do_not_matter(spelling: str) -> None:
    assert Observer.get_value_from_registry(spelling) is StaticMinMaxObserver


def test_names_are_listed() -> None:
    names = Observer.registered_names()
    assert names == sorted(names)
    assert {"minmax", "imatrix_mse", "nvfp4_expanded_mse"} <= set(names)


def test_register_with_aliases() -> None:
    @Observer.register("Own-Name", alias=["other name", "third"])
    class Own(StaticMinMaxObserver):
        pass

    for name in ("own_name", "other_name", "THIRD"):
        assert Observer.get_value_from_registry(name) is Own
    assert Own.registered_name() == "own_name"
    assert "own_name" in Observer.registered_names()
    assert "other_name" in Observer.registered_aliases()


def test_register_under_the_name_of_the_class() -> None:
    class Unnamed(StaticMinMaxObserver):
        pass

    Observer.register_value(Unnamed)
    assert Observer.get_value_from_registry("unnamed") is Unnamed


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigurationError) as caught:

        @Observer.register("minmax")
        class Impostor(StaticMinMaxObserver):
            pass

    assert "The name 'minmax' already stands for calipers.observers.classic.MinMaxObserver" in str(
        caught.value
    )
    assert Observer.get_value_from_registry("minmax") is MinMaxObserver


def test_a_name_is_taken_once_within_a_file_too() -> None:
    @Observer.register("taken")
    class First(StaticMinMaxObserver):
        pass

    with pytest.raises(ConfigurationError, match="The name 'taken' already stands for"):

        @Observer.register("taken")
        class Second(StaticMinMaxObserver):
            pass

    assert Observer.get_value_from_registry("taken") is First


def test_only_observers_can_be_registered() -> None:
    with pytest.raises(ConfigurationError, match="is not a subclass of Observer"):
        Observer.register_value(dict)  # type: ignore[arg-type]


class TestPlugin:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(PLUGIN)
        return path

    def test_loads_once(self, path: Path) -> None:
        observer = Observer.load_from_registry(f"{path}:Mine", args=QuantizationArgs())
        assert type(observer).__name__ == "Mine"
        assert observer(torch.ones(2, 2)).get_qparams()["scale"].shape == (1,)
        assert Observer.get_value_from_registry(f"{path}:Mine") is type(observer)

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"There is no file .*none.py' to load 'Mine'"):
            Observer.get_value_from_registry(f"{tmp_path / 'none.py'}:Mine")

    @pytest.mark.parametrize("name", ["Missing", "NotMine"])
    def test_class_that_is_not_there(self, path: Path, name: str) -> None:
        with pytest.raises(
            ConfigurationError, match=f"has no class '{name}' derived from Observer"
        ):
            Observer.get_value_from_registry(f"{path}:{name}")

    def test_file_that_fails(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.py"
        path.write_text("import nowhere_to_be_found")
        with pytest.raises(
            ConfigurationError, match=r"Loading .*broken.py' failed: ModuleNotFound"
        ):
            Observer.get_value_from_registry(f"{path}:Mine")
