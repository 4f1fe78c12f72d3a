"""What was seen of a model is found under its module, its tensor and its key."""

from __future__ import annotations

import torch

from calipers.measurements import Measurements
from calipers.measurements.tensors import readers_of
from calipers.statistics.sums import SquareSums


def test_two_who_want_the_same_of_a_tensor_share_it() -> None:
    seen = Measurements()
    first = seen.add("up", "input", "importance", SquareSums())
    assert seen.add("up", "input", "imatrix", SquareSums()) is first
    other = SquareSums(nonfinite="keep")
    assert seen.add("up", "input", "squares", other) is other
    assert seen.get("up", "input", "imatrix") is first
    assert seen.of(["up"]) == [first, other]


def test_other_tensors_and_other_modules_share_nothing() -> None:
    seen = Measurements()
    places = [("up", "input"), ("up", "output"), ("down", "input")]
    added = [seen.add(*place, "sums", SquareSums()) for place in places]
    assert len(set(added)) == 3
    assert [seen.get(*place, "sums") for place in places] == added


def test_a_module_has_seen_what_the_needed_statistic_that_saw_least_has() -> None:
    seen = Measurements()
    for base_name, tokens in (("input", 5), ("output", 3)):
        seen.add("up", base_name, "sums", SquareSums()).update(torch.ones(tokens, 4))
    seen.add("up", "output", "squares", SquareSums(nonfinite="keep"), is_optional=True)
    seen.add("down", "input", "squares", SquareSums(), is_optional=True)
    assert (seen.tokens("up"), seen.tokens("down")) == (3, None)


def test_what_an_earlier_run_left_is_known_until_forgotten() -> None:
    seen = Measurements()
    left = seen.add("up", "input", "sums", SquareSums(), is_from_earlier_run=True)
    own = seen.add("up", "output", "sums", SquareSums())
    assert seen.is_from_earlier_run("up", left)
    assert not seen.is_from_earlier_run("up", own)
    assert not seen.is_from_earlier_run("down", left)
    seen.forget(["up"])
    assert not seen.is_from_earlier_run("up", left)


def test_what_is_replaced_or_forgotten_is_gone() -> None:
    seen, other = Measurements(), SquareSums()
    seen.add("up", "input", "sums", SquareSums())
    seen.replace("up", "input", "sums", other)
    assert seen.get("up", "input", "sums") is other
    assert seen.of(["up"]) == [other]
    seen.forget(["up"])
    assert (seen.of(["up"]), seen.needed("up")) == ([], [])


def test_tensors_are_one_if_all_that_is_known_of_them_is_equal() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    other = x.clone()
    other[0, 0] = 9.0
    seen = Measurements()
    for module, tensor in {"q": x, "k": x.clone(), "up": other}.items():
        seen.add(module, "input", "squares", SquareSums()).update(tensor)
    readers = [[module for module, _ in places] for places, _ in readers_of(seen.tensors())]
    assert readers == [["q", "k"], ["up"]]
