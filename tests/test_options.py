"""Options in groups and one by one mean the same, and nothing is said twice or lost."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_args

import pytest

from calipers.engine.loop import PIPELINES
from calipers.errors import ConfigurationError
from calipers.options import (
    KEYWORDS,
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    EvaluateKeywords,
    EvaluateOptions,
    OneshotKeywords,
    OneshotOptions,
    OptionGroup,
    OutputOptions,
    Pipeline,
    RecipeOptions,
)

GROUPS = (DataOptions, ComputeOptions, CalibrationOptions, RecipeOptions, OutputOptions)


def test_nothing_given_is_the_default() -> None:
    assert OneshotOptions.merged({}) == OneshotOptions()
    assert OneshotOptions().data == DataOptions()
    assert DataOptions().given() == {}


def test_every_pipeline_but_the_choice_among_them_runs() -> None:
    assert {"auto", *PIPELINES} == set(get_args(Pipeline))


def test_keywords_find_their_groups() -> None:
    keywords = {
        "num_calibration_samples": 7,
        "batch_size": 2,
        "device": "cpu",
        "on_unseen": "peers",
        "group_size": 32,
        "overwrite": True,
    }
    assert OneshotOptions.merged(keywords) == OneshotOptions(
        data=DataOptions(num_samples=7, batch_size=2),
        compute=ComputeOptions(device="cpu"),
        calibration=CalibrationOptions(on_unseen="peers"),
        changes=RecipeOptions(group_size=32),
        output=OutputOptions(overwrite=True),
    )


def test_keywords_beside_a_group_that_says_something_else() -> None:
    group = DataOptions(num_samples=7)
    merged = OneshotOptions.merged({"batch_size": 2}, data=group, output=None)
    assert merged.data == DataOptions(num_samples=7, batch_size=2)
    assert merged.data.given() == {"num_samples": 7, "batch_size": 2}
    assert (group.batch_size, group.given()) == (None, {"num_samples": 7})
    assert EvaluateOptions.merged({"seed": 3}, data=group).data.num_samples == 7


@pytest.mark.parametrize(
    ("keywords", "groups", "text"),
    [
        (
            {"batch_size": 2},
            {"data": DataOptions(batch_size=4)},
            "batch_size=2 is given twice: beside data=DataOptions(batch_size=4). Keep one.",
        ),
        (  # though it is no news
            {"overwrite": False},
            {"output": OutputOptions(overwrite=False)},
            "overwrite=False is given twice: beside output=OutputOptions(overwrite=False). Keep",
        ),
        (
            {"num_calibration_samples": 2},
            {"data": DataOptions(num_samples=3)},
            "num_calibration_samples=2 is given twice: beside data=DataOptions(num_samples=3).",
        ),
        (
            {"num_samples": 2, "num_calibration_samples": 3},
            {},
            "num_calibration_samples=3 is given twice: beside num_samples=2. Keep one.",
        ),
        (
            {"batchsize": 2},
            {},
            "Unknown option 'batchsize'. Did you mean 'batch_size'? Allowed: tokenizer, num_sam",
        ),
        (
            {},
            {"data": {"batch_size": 2}},
            "data must be DataOptions, got {'batch_size': 2}. Pass data=DataOptions(…), or its",
        ),
        ({}, {"data": OutputOptions()}, "data must be DataOptions, got OutputOptions("),
    ],
)
def test_what_is_wrong_is_said(keywords: Any, groups: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match="^" + re.escape(text)):
        OneshotOptions.merged(keywords, **groups)


def test_evaluate_does_not_know_what_is_not_for_it() -> None:
    with pytest.raises(ConfigurationError, match=r"^Unknown option 'overwrite'"):
        EvaluateOptions.merged({"overwrite": True})


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_are_frozen_and_refuse_what_they_do_not_have(kind: type[OptionGroup]) -> None:
    name = kind.names()[0]
    with pytest.raises(FrozenInstanceError):
        setattr(kind(), name, 1)
    text = f"Unknown option '{name}s' of {kind.__name__}. Did you mean '{name}'? Allowed: {name}"
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        kind(**{f"{name}s": 1})


def test_what_was_given_is_kept_in_copies() -> None:
    group = DataOptions(seed=0)
    for again in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert again == group
        assert again.given() == {"seed": 0}
        assert again.gives("seed")
        assert not again.gives("skip")


def test_no_option_has_two_groups_and_types_know_all() -> None:
    names = [name for group in GROUPS for name in group.names()]
    assert len(names) == len(set(names))
    assert {*names, *KEYWORDS} == {*OneshotKeywords.__annotations__}
    both = {*DataOptions.names(), *ComputeOptions.names()}
    assert both == {*EvaluateKeywords.__annotations__}
    assert {each.default_factory for each in fields(OneshotOptions)} == {*GROUPS}


def test_samples_are_chosen_by_all_but_the_tokenizer() -> None:
    chosen = DataOptions(tokenizer="here", seed=3).sampling()
    assert chosen["seed"] == 3
    assert {*chosen} == {*DataOptions.names()} - {"tokenizer"}
