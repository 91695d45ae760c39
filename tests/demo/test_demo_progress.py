import io

import pytest
from rich.console import Console

from toolgap.demo.progress import Story


def story(*, terminal: bool) -> tuple[Story, io.StringIO]:
    file = io.StringIO()
    return Story(Console(file=file, width=80, force_terminal=terminal, color_system=None)), file


@pytest.mark.parametrize("terminal", [True, False])
def test_a_phase_ends_with_its_result(terminal: bool) -> None:
    teller, file = story(terminal=terminal)
    with teller.phase("starting [a] server") as phase:
        phase.note("loading")
        phase.result = "pid 7"
    assert "starting [a] server: pid 7 (0.0 s)" in file.getvalue()


def test_notes_are_lines_where_nothing_is_live_and_they_are_asked_for() -> None:
    teller, file = story(terminal=False)
    for notes in (True, False):
        with teller.phase("model", notes=notes) as phase:
            phase.note("downloading")
            phase.note("downloading")
    assert file.getvalue().count("downloading") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_phase_that_fails_says_so_and_passes_the_exception_on(terminal: bool) -> None:
    teller, file = story(terminal=terminal)

    def play() -> None:
        with teller.phase("playing") as phase:
            phase.result = "never shown"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play()
    assert "✗ playing (" in file.getvalue()
    assert "never shown" not in file.getvalue()
