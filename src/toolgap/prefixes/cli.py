"""The command ``toolgap check-prefix``: reads options, and knows no more than the modules it calls."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from toolgap.client import DEFAULT_URL
from toolgap.prefixes.turns import Turn, TurnsError, read_turns
from toolgap.protocol import Api
from toolgap.terminal import ApiKey, Exit, Json, Url, fail, guarded, print_json, refused


@guarded
def check_prefix(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Turns: a JSON list of request bodies, or a recording; - is stdin.",
            show_default=False,
        ),
    ],
    api: Annotated[
        Api | None,
        typer.Option(help="Whose form the bodies have; else it is seen from them.", show_default=False),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Check this session of a recording only.", show_default=False)
    ] = None,
    min_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Pass if so much of every turn's tokens is common with the next; at 1 all must be.",
        ),
    ] = 1.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    text_api_key: Annotated[
        str | None,
        typer.Option(help="SGLang's API key, if it has an admin API key beside it.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where a turn's prompt stops being an extension of the one before, why, and how to mend it.

    Exit status 0: every turn extends the one before, or shares as much as was asked for. 1: some turn does not.
    """
    from toolgap.prefixes.check import TurnRefused, check
    from toolgap.prefixes.report import print_report
    from toolgap.prefixes.server import Renderer

    turns = _read(file, api)
    if session is not None:
        turns = [turn for turn in turns if turn.session == session]
        if not turns:
            fail(Exit.USAGE, f"{file}: no turn has the session {session!r}")
    try:
        renderer = Renderer(url, api_key, text_api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with renderer:
        try:
            report = check(turns, renderer, min_share)
        except TurnsError as error:
            fail(Exit.USAGE, f"{file}: {error}")
        except TurnRefused as refusal:
            fail(Exit.REFUSED, f"{refusal.turn}: {refused(refusal.error)}")
    if as_json:
        print_json(report)
    else:
        print_report(report, Console(highlight=False))
    if not report.ok:
        raise typer.Exit(Exit.FAILED)


def _read(name: str, api: Api | None) -> list[Turn]:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        fail(Exit.USAGE, f"cannot read {name}: {error.strerror}")
    try:
        return read_turns(data, api)
    except TurnsError as error:
        fail(Exit.USAGE, f"{name}: {error}")
