"""The command that plays one agent turn."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from toolgap.terminal import Json, guarded


@guarded
def demo(
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens before the tool call, at least.")] = 4096,
    trials: Annotated[int, typer.Option(min=1, help="How often each arm is played.")] = 3,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the table, the chart, the results and the log.")
    ] = Path("demo-output"),
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path or hub name of another model.", show_default=False),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running server, whose L1 and L2 are flushed; else one is started.", show_default=False
        ),
    ] = None,
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--gpu", help="Where to run; a GPU is taken if there is one.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Watch one agent turn on a real engine, its continuation served three ways."""
    from toolgap.demo import main

    # With --json stdout is the results', and the story is told on stderr.
    console = Console(file=sys.stderr if as_json else None, highlight=False)
    status = main.run(prompt_tokens, trials, output, model=model, url=url, cpu=cpu, console=console)
    if as_json and (output / main.RESULTS).is_file():
        typer.echo((output / main.RESULTS).read_text(encoding="utf-8"), nl=False)
    raise typer.Exit(status)
