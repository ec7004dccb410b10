"""The tutorial's exercises can be solved, and their checks fail for whoever has not."""

import re

import pytest
from documents import ROOT
from exercises import check, solutions, stubs

ROUNDS = [
    (name, arguments)
    for name, function in vars(check).items()
    if name.startswith("test_")
    for mark in getattr(function, "pytestmark", [None])
    for arguments in ([()] if mark is None else mark.args[1])
]


@pytest.mark.parametrize("name, arguments", ROUNDS)
def test_the_committed_solution_passes(name, arguments):
    getattr(check, name)(solutions, *arguments)


@pytest.mark.parametrize("name, arguments", ROUNDS)
def test_a_stub_fails(name, arguments):
    with pytest.raises((NotImplementedError, AssertionError)):
        getattr(check, name)(stubs, *arguments)


def test_every_exercise_is_in_the_tutorial_with_a_check_and_a_solution():
    sections = re.split(r"^## (\d+)\. .*$", (ROOT / "tutorial.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    named = [
        (number, exercise)
        for number, section in zip(sections[::2], sections[1::2])
        for exercise in re.findall(r"`(\w+)`", section.partition("**Exercise")[2])
        if hasattr(stubs, exercise)
    ]
    checked = [re.fullmatch(r"test_section_(\d+)_(\w+)", name).groups() for name in dict(ROUNDS)]
    assert named == checked
    assert all(hasattr(solutions, exercise) for _, exercise in named)
