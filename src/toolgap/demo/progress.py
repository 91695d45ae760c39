"""What a user sees while the demo runs: one line a phase, with its seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Phase:
    """A phase that runs."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._shown = ""
        self.result: str | None = None
        """Shown behind the title when the phase has ended; None for nothing."""

    def note(self, text: str) -> None:
        """Say what the phase does now."""
        if text != self._shown:
            self._shown = text
            self._show(text)


class Story:
    """Prints phases: live with a clock on a terminal, a line at a time elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._good, self._bad = ("ok", "failed:") if console.options.ascii_only else ("✓", "✗")

    @contextmanager
    def phase(self, title: str, *, notes: bool = False) -> Iterator[Phase]:
        """A phase, from here to the end of the block.

        Args:
            title: What the phase does.
            notes: Whether its notes are worth a line each where nothing is live.
        """
        start_s = time.monotonic()
        try:
            with self._live(title) if self.console.is_terminal else self._plain(title, notes=notes) as phase:
                yield phase
        except BaseException:
            self._end(f"[red]{self._bad}[/red]", title, None, start_s)
            raise
        self._end(f"[green]{self._good}[/green]", title, phase.result, start_s)

    @contextmanager
    def _live(self, title: str) -> Iterator[Phase]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(_line(title, None))
            yield Phase(lambda text: bar.update(task, description=_line(title, text)))

    @contextmanager
    def _plain(self, title: str, *, notes: bool) -> Iterator[Phase]:
        def show(text: str) -> None:
            if notes:
                self.say(f"[dim]    {escape(text)}[/dim]")

        self.say(f"[dim]  {escape(title)} ...[/dim]")
        yield Phase(show)

    def say(self, markup: str) -> None:
        """Print a paragraph, wrapped by the terminal and not by us, so that paths in it can be copied."""
        self.console.print(markup, soft_wrap=True)

    def _end(self, mark: str, title: str, result: str | None, start_s: float) -> None:
        took_s = time.monotonic() - start_s
        self.say(f"{mark} {_line(title, result)} [dim]({took_s:.1f} s)[/dim]")


def _line(title: str, text: str | None) -> str:
    return f"{escape(title)}: [dim]{escape(text)}[/dim]" if text else escape(title)
