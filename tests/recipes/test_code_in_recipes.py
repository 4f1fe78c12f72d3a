"""A file of Python code that a recipe names runs with a permission, and never without one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from compressed_tensors.quantization import QuantizationArgs
from families import build, saved
from shell import run_here

import calipers
from calipers.errors import CodeNotAllowedError, RecipeError
from calipers.observers import Observer
from calipers.recipes import Recipe, Stage, load_recipe
from calipers.steps import QuantizationModifier

CODE = """
from pathlib import Path
from calipers.observers import MinMaxObserver

Path(__file__).with_suffix(".ran").touch()

class Mine(MinMaxObserver):
    pass
"""
INT4 = {"num_bits": 4, "strategy": "channel"}
NAME = "NAME"


def modifier(**fields: Any) -> dict[str, Any]:
    return {"modifiers": {"QuantizationModifier": fields}}


WAYS = {
    "weight_observer": modifier(scheme="W8A16", weight_observer=NAME),
    "weight_observer.name": modifier(scheme="W8A16", weight_observer={"name": NAME}),
    "activation_observer": modifier(scheme="FP8", activation_observer=NAME),
    "observer.input": modifier(scheme="FP8", observer={"input": {"name": NAME}}),
    "weights.observer": modifier(weights={**INT4, "observer": NAME}),
    "scheme.weights.observer": modifier(scheme={"weights": {**INT4, "observer": NAME}}),
    "config_groups.some.weights.observer": modifier(
        config_groups={"some": {"targets": ["Linear"], "weights": {**INT4, "observer": NAME}}}
    ),
    "kv_cache_scheme.observer": modifier(kv_cache_scheme={"num_bits": 8, "observer": NAME}),
}


class Plugin:
    """A file with an observer that leaves a trace when it runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "evil.py"
        self.path.write_text(CODE)
        self.name = f"{self.path}:Mine"

    @property
    def ran(self) -> bool:
        return self.path.with_suffix(".ran").exists()

    def named_in(self, recipe: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(recipe).replace(f'"{NAME}"', json.dumps(self.name)))


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", [lambda data: data, yaml.safe_dump, json.dumps])
def test_a_recipe_runs_nothing_without_permission(
    way: str, form: Callable[[Any], Any], plugin: Plugin
) -> None:
    recipe = form(plugin.named_in(WAYS[way]))
    key = way.removesuffix(".name")
    with pytest.raises(CodeNotAllowedError) as caught:
        load_recipe(recipe)
    assert not plugin.ran
    assert (
        f"QuantizationModifier.{key}: '{plugin.name}' is Python code, which was not run: it could "
        f"do anything that you can. If you trust the file '{plugin.path}', pass allow_code=True."
    ) in str(caught.value)
    loaded = load_recipe(recipe, allow_code=True)
    assert plugin.ran
    with pytest.raises(CodeNotAllowedError):  # a permission is for one call
        load_recipe(loaded.to_yaml())
    with pytest.raises(CodeNotAllowedError):
        load_recipe([loaded])


def test_the_error_says_where_the_recipe_says_it(plugin: Plugin, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(plugin.named_in(WAYS["weights.observer"])))
    (line,) = [i for i, text in enumerate(path.read_text().split("\n"), 1) if "observer" in text]
    expected = f"{path}, line {line}: QuantizationModifier.weights.observer: '{plugin.name}' is"
    with pytest.raises(CodeNotAllowedError, match=f"^{re.escape(expected)}"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("class_name", "options", "problem"),
    [
        ("Yours", {}, "'.*evil.py' has no class 'Yours' derived from Observer."),
        ("Mine", {"evil": "evil.py:Mine"}, "Unknown option 'evil' for observer 'Mine'."),
    ],
)
def test_what_can_only_be_checked_by_running_the_file(
    class_name: str, options: dict[str, Any], problem: str, plugin: Plugin
) -> None:
    observer = {"name": f"{plugin.path}:{class_name}", **options}
    recipe = modifier(scheme="W8A16", weight_observer=observer)
    with pytest.raises(CodeNotAllowedError):
        load_recipe(recipe)
    with pytest.raises(RecipeError, match=rf"QuantizationModifier.weight_observer: {problem}"):
        load_recipe(recipe, allow_code=True)


def test_objects_run_nothing_either(plugin: Plugin) -> None:
    made = QuantizationModifier(scheme="W8A16", weight_observer=plugin.name)  # type: ignore[arg-type]
    model = build("llama")
    with pytest.raises(CodeNotAllowedError, match=r"^QuantizationModifier.weight_observer: "):
        load_recipe([made])
    with pytest.raises(RecipeError, match="is Python code, which was not run"):
        Recipe((Stage("default", (made,)),)).compile(model)
    with pytest.raises(CodeNotAllowedError):
        Observer.get_value_from_registry(plugin.name, allow_code=False)
    assert not plugin.ran
    plan = load_recipe(made, allow_code=True).compile(model)
    assert plugin.ran
    assert {tensor.observer.name for _, tensor in plan} == {"Mine"}


def test_who_asks_the_registry_in_python_gets_the_class(plugin: Plugin) -> None:
    assert (
        type(Observer.load_from_registry(plugin.name, args=QuantizationArgs())).__name__ == "Mine"
    )
    assert plugin.ran
    assert Observer.get_value_from_registry(plugin.name, allow_code=False).__name__ == "Mine"


def test_oneshot_needs_the_permission(plugin: Plugin, tmp_path: Path) -> None:
    model, out = build("llama"), tmp_path / "out"
    recipe = plugin.named_in(WAYS["weight_observer"])
    with pytest.raises(CodeNotAllowedError):
        calipers.oneshot(model, recipe, output_dir=out, progress=False)
    assert not plugin.ran
    assert not out.exists()
    result = calipers.oneshot(model, recipe, output_dir=out, progress=False, allow_code=True)
    assert plugin.ran
    assert {row["observer"] for row in result.plan.rows()} == {"Mine"}
    assert plugin.name in (out / "recipe.yaml").read_text()


@pytest.mark.parametrize("command", ["plan", "quantize"])
@pytest.mark.parametrize("given", ["--recipe", "--observer"])
def test_commands_need_the_permission(
    command: str, given: str, plugin: Plugin, tmp_path: Path
) -> None:
    folder = saved(build("llama"), tmp_path / "model")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(plugin.named_in(WAYS["weight_observer"])))
    options = (
        ["--scheme", "W8A16", given, plugin.name] if given == "--observer" else [given, recipe]
    )
    output = ["-o", tmp_path / "out"] if command == "quantize" else []
    arguments = [*map(str, (command, folder, *options, *output))]
    done = run_here(*arguments)
    assert done.exit_code == 2
    assert f"'{plugin.name}' is Python code, which was not run" in done.stderr
    assert f"If you trust the file '{plugin.path}', pass --allow-code." in done.stderr
    assert (given == "--observer") == ("--observer: " in done.stderr)
    assert not plugin.ran
    assert not (tmp_path / "out").exists()
    done = run_here(*arguments, "--allow-code")
    assert done.exit_code == 0, done.stderr
    assert plugin.ran


def test_the_command_that_lists_observers_needs_it_too(plugin: Plugin) -> None:
    assert run_here("observers", plugin.name).exit_code == 2
    assert not plugin.ran
    assert run_here("observers", plugin.name, "--allow-code").exit_code == 0
    assert plugin.ran


def test_our_own_code_says_each_time_whether_code_may_run() -> None:
    """What users call in Python may run a file; nothing in Calipers relies on that default."""
    source = Path(calipers.__file__).parent
    calls = [
        (path, node)
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in ("Observer.get_value_from_registry", "Observer.load_from_registry")
    ]
    assert len(calls) >= 3
    for path, call in calls:
        said = {keyword.arg for keyword in call.keywords}
        fixed = bool(call.args) and isinstance(call.args[0], ast.Constant)
        assert fixed or "allow_code" in said, (path, ast.unparse(call))
