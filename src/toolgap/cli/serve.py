"""The command that starts a server."""

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from toolgap.serve import ServeError
from toolgap.settings import Settings, SettingsError, variable
from toolgap.store.config import StoreConfig
from toolgap.store.options import Fsync, ReadPath
from toolgap.terminal import Exit, SglangArguments, complain, fail, guarded, print_json, with_options

SETTINGS_PANEL = "Settings of Toolgap"
STORE_PANEL = "Store"
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
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Toolgap's own L3 in this folder, verified and as fast as the disk; made if it is not there.",
            show_default=False,
            rich_help_panel=STORE_PANEL,
        ),
    ] = None,
    store_limit_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="The most that the folder may hold, in GiB; the least recently used pages go. Without it, until the "
            "disk is full.",
            show_default=False,
            rich_help_panel=STORE_PANEL,
        ),
    ] = None,
    store_fsync: Annotated[
        Fsync,
        typer.Option(
            help="`none`: pages survive the death of the server; `batch`: a loss of power too.",
            rich_help_panel=STORE_PANEL,
        ),
    ] = Fsync.NONE,
    store_read_path: Annotated[
        ReadPath,
        typer.Option(
            help="Through the page cache (`cached`), around it (`direct`), or each where it is faster (`auto`).",
            rich_help_panel=STORE_PANEL,
        ),
    ] = ReadPath.AUTO,
    store_weights: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A name for the weights and how they are loaded, in place of their fingerprint.",
            show_default=False,
            rich_help_panel=STORE_PANEL,
        ),
    ] = "",
    store_salt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Whatever else must be equal for pages to be reusable.",
            show_default=False,
            rich_help_panel=STORE_PANEL,
        ),
    ] = "",
    only_print: Annotated[
        bool, typer.Option("--print", help="Show the command and its environment; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --print: as JSON.")] = False,
    **settings: Any,
) -> None:
    """Start SGLang with Toolgap's settings, in place of this process.

    Everything after -- goes to SGLang, as in:

    toolgap serve -- --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend file

    toolgap serve --store /nvme/kv --store-limit-gib 500 -- --model-path MODEL
    """
    from toolgap import serve as server

    if store is None and (store_limit_gib, store_weights, store_salt) != (None, "", ""):
        raise typer.BadParameter("the settings of a store go with --store PATH")
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
            store=None
            if store is None
            else StoreConfig(
                path=str(store.expanduser().resolve()),
                limit_bytes=None if store_limit_gib is None else int(store_limit_gib * (1 << 30)),
                fsync=store_fsync,
                read_path=store_read_path,
                weights=store_weights,
                salt=store_salt,
            ),
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
