"""A quick `__init__` makes what the dataclass's own would, and nothing of what a dataclass promises is lost."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.events import EVENT_TYPES, InferenceRequested, Sampling
from schemas.quick import quick


@pytest.mark.parametrize("slots", [True, False])
def test_arguments_and_defaults_are_the_same(slots: bool) -> None:
    @quick
    @dataclass(frozen=True, slots=slots)  # type: ignore[literal-required]
    class Made:
        first: int
        second: str = "two"
        third: dict[str, int] = field(default_factory=dict)

    assert dataclasses.astuple(Made(1)) == (1, "two", {})
    assert dataclasses.astuple(Made(1, third={"a": 1}, second="2")) == (1, "2", {"a": 1})
    assert Made(1).third is not Made(1).third
    assert dataclasses.replace(Made(1), first=3) == Made(3)
    with pytest.raises(TypeError, match="first"):
        Made()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="fourth"):
        Made(1, fourth=4)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Made(1).first = 2  # type: ignore[misc]


@pytest.mark.parametrize("cls", EVENT_TYPES)
def test_events_say_which_arguments_they_take(cls: type[Any]) -> None:
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == [item.name for item in dataclasses.fields(cls)]
    assert all(parameters[item.name].annotation == item.type for item in dataclasses.fields(cls))


def test_a_part_is_made_anew_for_each_event() -> None:
    assert InferenceRequested("a", "m").sampling == Sampling()
    assert InferenceRequested("a", "m").sampling is not InferenceRequested("a", "m").sampling


def test_what_it_cannot_make_is_told() -> None:
    @dataclass(frozen=True)
    class Above:
        first: int

    class Inherits(Above):
        pass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ByName:
        first: int

    @dataclass(frozen=True, slots=True)
    class Checks:
        first: int

        def __post_init__(self) -> None:
            raise AssertionError

    for cls in (Inherits, ByName, Checks):
        with pytest.raises(TypeError, match="first is not a plain field"):
            quick(cls)
