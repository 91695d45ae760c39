"""The command that starts the gateway."""

import importlib.util
import inspect
import os
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer

from toolgap.gateway.config import FIELDS, FILE_VARIABLE, SECRETS, ConfigError, flag, load, shown
from toolgap.terminal import Exit, Json, fail, guarded, print_json, with_options


def _flags(name: str, kind: Any) -> tuple[str, ...]:
    # A switch can be turned off as well.
    return (f"{flag(name)}/{flag(name).replace('--', '--no-', 1)}",) if kind is bool else (flag(name),)


def _option(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    kind, *described = get_args(field.type)
    # Limits may be in a Meta of their own.
    help_text = next(meta.description for meta in described if meta.description)
    several = get_origin(kind) is tuple
    if several or field.required:
        shown: bool | str = False
    else:
        shown = str(field.default)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None if several else kind | None,
            typer.Option(
                *_flags(field.name, kind),
                help=help_text,
                show_default=shown,
                metavar="NAME=SECONDS" if field.name == "tool_gaps" else "URL" if several else None,
            ),
        ],
    )


SETTINGS = tuple(_option(field) for field in FIELDS if field.name not in SECRETS)
"""One option for each of the gateway's settings but secrets: other processes see the command line."""


@with_options(SETTINGS)
@guarded
def gateway(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings in TOML, as --print shows them.",
            show_default=f"${FILE_VARIABLE}",
        ),
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Show the settings; start nothing.")] = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Pass requests on to SGLang as they are, and restore while tools run: a reverse proxy for one or several servers.

    A setting without an option is taken from its variable, else from the file: TOOLGAP_GATEWAY_PORT is that
    of --port, and TOOLGAP_GATEWAY_UPSTREAMS has all upstreams. The key for restores, if requests bring none that
    will do, is in TOOLGAP_GATEWAY_API_KEY or in the file. The log is JSON on stderr. SIGTERM lets running answers
    end.
    """
    try:
        loaded = load(settings, os.environ, config)
    except ConfigError as error:
        fail(Exit.USAGE, str(error))
    if only_print:
        values = shown(loaded)
        if as_json:
            print_json(values)
        else:
            for name, value in values.items():
                # A string, a number and a list of strings are in TOML what they are in JSON; it has no null.
                if value is not None:
                    typer.echo(f"{name} = {msgspec.json.encode(value).decode()}")
        return
    needed = ("anyio", "httptools", "prometheus_client", "starlette", "uvicorn", "uvloop")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        fail(Exit.USAGE, f"{' and '.join(missing)} missing: pip install 'toolgap[gateway]'")
    from toolgap.gateway import service
    from toolgap.gateway.recording import RecordingError

    try:
        started = service.run(loaded)
    except RecordingError as error:
        fail(Exit.USAGE, str(error))
    if not started:
        raise typer.Exit(Exit.FAILED)
