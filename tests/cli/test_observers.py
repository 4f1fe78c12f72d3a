"""What ``calipers observers`` tells is what the classes and the documents say."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from shell import run, run_here

from calipers import registry
from calipers.observers import Observer

README = Path(__file__).parent.parent.parent / "README.md"


def readme_rows() -> dict[str, tuple[str, str]]:
    """The table 'Choose an observer': name → what it remembers, and when."""
    section = README.read_text().partition("## Choose an observer")[2].partition("\n\nIn one")[0]
    rows: dict[str, tuple[str, str]] = {}
    for name, remembers, when in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", section, re.M):
        same = remembers == "the same"
        rows[name] = (list(rows.values())[-1][0] if same else remembers, when)
    return rows


def test_the_classes_say_what_the_readme_says() -> None:
    classes = {name: Observer.get_value_from_registry(name) for name in readme_rows()}
    assert {name: (cls.remembers, cls.when) for name, cls in classes.items()} == readme_rows()
    ours = {n for n in Observer.registered_names() if known(n)}
    assert ours == set(readme_rows())


def known(name: str) -> bool:
    """Other tests register observers of their own."""
    return Observer.get_value_from_registry(name).__module__.startswith("calipers.observers.")


def test_all_are_listed_with_their_use() -> None:
    done = run("observers")
    assert (done.returncode, done.stderr) == (0, "")
    for name, (_, when) in readme_rows().items():
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert line.rstrip().endswith(when)
    assert "calipers observers NAME" in done.stdout


def test_one_that_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("astray", "nowhere:Observer", Observer.registry.group)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])  # noqa: ARG005
    monkeypatch.setattr(Observer.registry, "_has_entry_points", False)
    monkeypatch.setattr(Observer.registry, "_sources", dict(Observer.registry._sources))
    done = run("observers")
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("Warning: observer 'astray' (nowhere.Observer of the package nowhere")
    assert "static_minmax" in done.stdout
    assert "astray" not in done.stdout


def test_one_in_detail() -> None:
    done = run_here("observers", "IMatrix-MSE")
    assert done.exit_code == 0
    lines = [re.sub(" +", " ", line).strip() for line in done.stdout.splitlines()]
    assert lines[0] == "Weighs the error of each weight by E[x²] of its input channel."
    assert "remembers best shrunk range under importance, Σx² and tokens" in lines
    assert "watches weights" in lines
    assert "merges the sums of inputs do, until a weight is observed" in lines
    assert "maxshrink float, in [0, 1] 0.95 how far the range is shrunk at most" in lines
    assert (
        "nonfinite raise or ignore raise NaN and Inf are an error, or left out and counted" in lines
    )
    assert lines[-1].startswith("Example: calipers quantize demo --scheme W4A16 --observer imatrix")


def test_other_names_are_told() -> None:
    alone = run_here("observers", "fouroversix").stdout
    assert re.search(r"^also called +fouroversix *$", alone, re.MULTILINE)
    assert "fouroversix is another name of nvfp4_expanded_mse." in run_here("observers").stdout
    assert "also called" not in run_here("observers", "mse").stdout


def test_everything_as_data() -> None:
    listed = json.loads(run_here("observers", "--json").stdout)
    told = {each["name"]: each for each in listed if known(each["name"])}
    assert told.keys() == readme_rows().keys()
    assert all(each["does"] and each["when"] and each["remembers"] for each in told.values())
    assert all(option["meaning"] for each in told.values() for option in each["options"])
    one = json.loads(run_here("observers", "optimal", "--json").stdout)
    assert one == told["optimal"]
    assert [option["name"] for option in one["options"]] == [
        *("nonfinite", "strict", "importance", "signed_scale", "shortlist"),
    ]
    assert one["options"][-1]["type"] == "int, >= 1, <= 256"
    assert one["options"][2]["type"] == "none or imatrix or hessian"


@pytest.mark.parametrize(
    ("name", "watches", "merges"),
    [
        ("optimal", ["weights"], "the sums of inputs do"),
        ("histogram_mse", ["weights", "inputs", "outputs", "queries", "keys", "values"], "yes"),
        (
            "minmax",
            ["weights", "inputs", "outputs", "queries", "keys", "values"],
            "no: it keeps the",
        ),
        ("memoryless_mse", ["weights", "inputs", "outputs", "queries", "keys", "values"], "no:"),
    ],
)
def test_what_they_watch_and_whether_they_merge(name: str, watches: list[str], merges: str) -> None:
    told = json.loads(run_here("observers", name, "--json").stdout)
    assert told["watches"] == watches
    assert told["merges"].startswith(merges)


def test_a_misspelt_name_gets_the_nearest() -> None:
    done = run("observers", "histogram_msee")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown observer 'histogram_msee'. Did you mean 'histogram_mse'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_observer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from calipers.observers import MinMaxObserver\n"
        "class Mine(MinMaxObserver):\n"
        '    """Does as I say."""\n'
    )
    done = run_here("observers", f"{tmp_path / 'mine.py'}:Mine", "--allow-code")
    assert done.stdout.startswith("Does as I say.\n")


def test_an_observer_of_the_first_generation(tmp_path: Path) -> None:
    """Its constructor knows nothing but ``quantization_args``."""
    (tmp_path / "old.py").write_text(
        "from calipers.observers import Observer\n"
        "class Old(Observer):\n"
        '    """Does as it always did."""\n'
        "    def __init__(self, quantization_args):\n"
        "        super().__init__(quantization_args=quantization_args)\n"
    )
    done = run("observers", f"{tmp_path / 'old.py'}:Old", "--allow-code")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Does as it always did.\n")
