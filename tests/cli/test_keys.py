"""Keys of a pseudo-terminal."""

import os
import termios
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest

from toolgap.cli.keys import Keys


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """The end that a person types at, and the end that the command reads."""
    person, command = os.openpty()
    with os.fdopen(command, "r") as source:
        yield person, source
    os.close(person)


@pytest.mark.parametrize("typed", [b"q", b"Q", b"xyq"])
def test_a_key_needs_no_enter(terminal: tuple[int, TextIO], typed: bytes) -> None:
    person, source = terminal
    with Keys(source) as keys:
        os.write(person, typed)
        assert keys.pressed("q", 60.0)


def test_other_keys_are_none(terminal: tuple[int, TextIO]) -> None:
    person, source = terminal
    with Keys(source) as keys:
        os.write(person, b"xyz")
        assert not keys.pressed("q", 0.01)


def test_the_terminal_is_left_as_it_was(terminal: tuple[int, TextIO]) -> None:
    _, source = terminal
    before = termios.tcgetattr(source)
    with suppress(KeyboardInterrupt), Keys(source):
        assert termios.tcgetattr(source) != before
        raise KeyboardInterrupt
    assert termios.tcgetattr(source) == before


def test_without_a_terminal_there_are_no_keys() -> None:
    with open(os.devnull) as source, Keys(source) as keys:  # noqa: PTH123
        assert not keys.pressed("q", 0.01)
    with Keys(None) as keys:
        assert not keys.pressed("q", 0.01)
