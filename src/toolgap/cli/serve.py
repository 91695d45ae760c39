"""The command that starts a server."""

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from toolgap.serve import ServeError
from toolgap.settings import Settings, SettingsError, variable
from toolgap.terminal import Exit, SglangArguments, complain, fail, guarded, print_json, with_options

SETTINGS_PANEL = "Settings of Toolgap"
SETTINGS = tuple(
    inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            type(setting.default) | None,
            typer.Option(
                help=f"{setting.metadata['help']} (default: ${variable(setting.name)}, else {setting.default})",
                show_default=False,
                rich_help_panel=SETTINGS_PANEL,
            ),
        ],
    )
    for setting in fields(Settings)
)
"""One option for each of the plugin's settings."""


@with_options(SETTINGS)
@guarded
def serve(
    arguments: SglangArguments = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on a CPU, without a GPU.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="SGLang's --model-path; with --cpu, SmolLM2-135M-Instruct (made on first use) if left out.",
            show_default=False,
        ),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Show the command and its environment; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --print: as JSON.")] = False,
    **settings: Any,
) -> None:
    """Start SGLang with Toolgap's settings, in place of this process.

    Everything after -- goes to SGLang, as in:

    toolgap serve -- --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend file
    """
    from toolgap import serve as server

    if as_json and not only_print:
        raise typer.BadParameter("--json goes with --print: what a server prints is SGLang's own")
    try:
        if not only_print:
            server.require_sglang()
        launch = server.plan(
            arguments or (),
            settings,
            os.environ,
            cpu=cpu,
            model=model,
            default_cpu_model=_smollm2_path if only_print else _smollm2,
        )
    except (ServeError, SettingsError) as error:
        fail(Exit.USAGE, str(error))
    if only_print and as_json:
        print_json({"command": launch.command, "environment": launch.changes(os.environ)})
        return
    if only_print:
        typer.echo(launch.as_shell(os.environ))
        return
    server.execute(launch)


def _smollm2() -> Path:
    from toolgap.cpu.model import ModelSetupError, ensure_smollm2

    try:
        return ensure_smollm2(report=complain)
    except ModelSetupError as error:
        fail(Exit.FAILED, str(error))


def _smollm2_path() -> Path:
    """Where it is, or will be."""
    from toolgap.cpu.model import FOLDER, default_cache_dir

    return default_cache_dir() / FOLDER
