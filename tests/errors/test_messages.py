"""How messages are made of their parts, and that nothing of them is lost on the way."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest

from calipers import errors
from calipers.errors import (
    ANY,
    CalipersError,
    CalipersWarning,
    Call,
    ConfigurationError,
    Context,
    Option,
    Text,
    joined,
    text_of,
)

OVERWRITE = Option("overwrite", True)


def shout(term: Option | Call) -> str:
    return f"<{term.name.upper()}>"


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (Context("is gone"), "is gone."),
        (Context("is gone", "The file"), "The file is gone."),
        (Context("is gone", "The file", "a.yaml, line 3"), "a.yaml, line 3: The file is gone."),
        (Context("must be a number", "seed", got="'x'"), "seed must be a number, got 'x'."),
        (Context("is not allowed", OVERWRITE), "overwrite=True is not allowed."),
        (Context("unknown 'sed'", meant="seed"), "unknown 'sed'. Did you mean 'seed'?"),
        (Context("no", allowed=["a", "b"]), "no. Allowed: a, b."),
        (Context("no", allowed="1 or more."), "no. Allowed: 1 or more."),
        (Context("no", hint="Pass " + OVERWRITE), "no. Pass overwrite=True."),
        (Context("no", hint="Is it?"), "no. Is it?"),
        (Context("no", hint="Pass " + Option("dataset", ANY)), "no. Pass dataset=…"),
        (Context("no:\n  a\n  b"), "no:\n  a\n  b"),
        (Context("no:\n  a", hint="Do it"), "no:\n  a\nDo it."),
        (
            Context("is wrong", "It", "here", "1", "2", ["2", "3"], "Do it"),
            "here: It is wrong, got 1. Did you mean '2'? Allowed: 2, 3. Do it.",
        ),
    ],
)
def test_the_message_has_all_parts_in_order(context: Context, message: str) -> None:
    assert str(context.text) == message


def test_only_what_is_said_is_data() -> None:
    context = Context("is wrong", OVERWRITE, allowed=("a", "b"), hint="Leave it out")
    said = {"what": "is wrong", "subject": "overwrite=True", "allowed": "a, b"}
    assert context.as_dict() == {**said, "hint": "Leave it out"}
    assert context.as_dict(shout)["subject"] == "<OVERWRITE>"


def test_options_are_spelt_by_whoever_shows_the_message() -> None:
    hint = "Pass " + OVERWRITE + ", or see " + Call("plan.table")
    error = CalipersError("is there", subject=Option("output_dir", "a"), hint=hint)
    assert str(error) == "output_dir='a' is there. Pass overwrite=True, or see plan.table()."
    assert error.spelt(shout) == "<OUTPUT_DIR> is there. Pass <OVERWRITE>, or see <PLAN.TABLE>."
    assert error.args == (str(error),)


def test_a_place_and_a_hint_can_be_added() -> None:
    error = CalipersError("is wrong", subject="It", where="line 3", hint="Pass " + OVERWRITE)
    error.add_place("recipe")
    error.add_hint("It was batch 7")
    assert str(error) == "recipe: line 3: It is wrong. Pass overwrite=True. It was batch 7."
    assert error.args == (str(error),)
    assert error.spelt(shout).endswith("Pass <OVERWRITE>. It was batch 7.")
    bare = CalipersError("is wrong")
    bare.add_place("here")
    bare.add_hint("Correct it.")
    assert str(bare) == "here: is wrong. Correct it."


ONE_OF_EACH = [
    CalipersError("no", hint="Pass " + OVERWRITE),
    errors.ModelLoadError("no", subject="The model"),
    errors.CheckpointExistsError("no"),
    errors.not_finite("here", 1, 2, (3,)),
    errors.UnknownObserverError("no", meant="minmax", allowed=["minmax", "mse"]),
    errors.RecipeError("no", path=("a", 0), source="r.yaml", line=3),
    errors.UnseenModulesError("no", names=["a"]),
    errors.FusedExpertsError("no", subject="The experts"),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_can_be_copied_and_sent(error: CalipersError, again: Any) -> None:
    other = again(error)
    assert type(other) is type(error)
    assert (str(other), other.args, other.context.as_dict()) == (
        str(error),
        error.args,
        error.context.as_dict(),
    )
    assert other.spelt(shout) == error.spelt(shout)


def test_texts_can_be_sent_as_plain_data() -> None:
    text = "Pass " + OVERWRITE + ", " + Option("dataset") + " or " + Call("plan.table")
    data = text.to_data()
    assert data[0] == "Pass "
    assert Text.from_data(data).spelt(shout) == "Pass <OVERWRITE>, <DATASET> or <PLAN.TABLE>"
    assert str(Text.from_data(data)) == "Pass overwrite=True, dataset or plan.table()"
    assert text_of(CalipersError("no", hint=text)).spelt(shout).startswith("no. Pass <OVERWRITE>")
    assert str(text_of(KeyError("x"))) == "'x'"


def test_texts_are_equal_to_what_they_say() -> None:
    text = "Pass " + OVERWRITE
    assert text == "Pass overwrite=True"
    assert {text, "Pass overwrite=True"} == {text}
    assert text != "Pass"
    assert not Text("")
    assert str(joined(", ", ["a", "", text])) == "a, Pass overwrite=True"


def test_warnings_keep_their_parts() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(CalipersWarning("It is old", hint="Pass " + OVERWRITE), stacklevel=1)
        warnings.warn("It is old.", CalipersWarning, stacklevel=1)
    told = [each.message for each in caught]
    assert [str(each) for each in told] == ["It is old. Pass overwrite=True.", "It is old."]
    assert isinstance(told[0], CalipersWarning)
    assert told[0].spelt(shout) == "It is old. Pass <OVERWRITE>."


def test_what_a_caller_of_python_would_catch() -> None:
    bases: dict[type[CalipersError], type[Exception]] = {
        ConfigurationError: ValueError,
        errors.DataError: ValueError,
        errors.ModelLoadError: OSError,
        errors.ModelRunError: RuntimeError,
        errors.TensorValueError: ValueError,
        errors.CheckpointError: OSError,
        errors.CheckpointExistsError: FileExistsError,
        errors.UnknownObserverError: KeyError,
        errors.TensorKindError: TypeError,
        errors.NoStatisticsError: AssertionError,
        errors.ImportanceUnsupportedError: NotImplementedError,
        errors.UnseenModulesError: ValueError,
        errors.FusedExpertsError: NotImplementedError,
        errors.RankError: RuntimeError,
        errors.MergeError: ValueError,
    }
    for kind, base in bases.items():
        assert issubclass(kind, base)
        assert issubclass(kind, CalipersError)
    codes = {kind.__name__: kind.exit_code for kind in bases}
    assert codes == {
        "ConfigurationError": 2,
        "DataError": 2,
        "ModelLoadError": 2,
        "ModelRunError": 3,
        "TensorValueError": 3,
        "CheckpointError": 7,
        "CheckpointExistsError": 7,
        "UnknownObserverError": 2,
        "TensorKindError": 2,
        "NoStatisticsError": 4,
        "ImportanceUnsupportedError": 3,
        "UnseenModulesError": 4,
        "FusedExpertsError": 3,
        "RankError": 6,
        "MergeError": 5,
    }
