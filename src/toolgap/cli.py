"""The command ``toolgap``.

What a person reads goes to stdout as text, with ``--json`` as JSON; complaints go to stderr. Nothing
here knows more than the modules it calls: it reads options, prints, and chooses the exit status.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolgap import protocol
from toolgap.bench.cli import app as bench_app
from toolgap.client import DEFAULT_URL, SubmitFields, Toolgap
from toolgap.doctor import Finding, Level, has_problem
from toolgap.hooks.cli import app as hooks_app
from toolgap.protocol import OperationStatus, Overview, State, Target
from toolgap.serve import ServeError
from toolgap.settings import Settings, SettingsError, variable
from toolgap.terminal import (
    EXITS,
    ApiKey,
    Exit,
    Json,
    Url,
    complain,
    fail,
    guarded,
    print_json,
    say,
)

P = ParamSpec("P")

app = typer.Typer(
    name="toolgap",
    help="Restore an agent's KV cache while its tool call runs, on stock SGLang.",
    epilog="\n".join(["Exit status:", *(f"{status.value:>3}  {text}" for status, text in EXITS.items())]),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

OperationId = Annotated[str, typer.Argument(metavar="ID", help="The operation's id.", show_default=False)]
SglangArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- SGLANG-ARGUMENTS", help="SGLang's own arguments, after --.", show_default=False
    ),
]


def _client(url: str, api_key: str | None) -> Toolgap:
    try:
        return Toolgap(url, api_key=api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# ---- operations ----


@app.command()
@guarded
def submit(
    text: Annotated[str | None, typer.Option(help="The prefix as text.", show_default=False)] = None,
    text_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="It is in this file; - is stdin.", show_default=False)
    ] = None,
    ids_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A JSON list of token ids; - is stdin.", show_default=False),
    ] = None,
    operation_id: Annotated[
        str | None,
        typer.Option("--id", help="Makes it idempotent; made by the server if left out.", show_default=False),
    ] = None,
    extra_key: Annotated[str | None, typer.Option(help="As in /generate.", show_default=False)] = None,
    cache_salt: Annotated[str | None, typer.Option(help="As in /generate.", show_default=False)] = None,
    lora_path: Annotated[
        str | None, typer.Option("--lora", metavar="NAME", help="A LoRA adapter's name.", show_default=False)
    ] = None,
    dp_rank: Annotated[
        int | None,
        typer.Option(min=0, help="With data parallelism: the continuation's replica.", show_default=False),
    ] = None,
    ttl_s: Annotated[
        float | None,
        typer.Option("--ttl", metavar="SECONDS", help="Pending work stops after this.", show_default=False),
    ] = None,
    expected_gap_s: Annotated[
        float | None,
        typer.Option(
            "--gap",
            metavar="SECONDS",
            help="When the continuation is expected: operations are served in that order.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Target | None, typer.Option(help="device: promote to free device memory too.", show_default=False)
    ] = None,
    lease_s: Annotated[
        float | None,
        typer.Option(
            "--lease",
            metavar="SECONDS",
            help="Hold it in host memory for so long, or until a request uses it.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Refuse unless the server's is this one.", show_default=False)
    ] = None,
    retry_for_s: Annotated[
        float,
        typer.Option(
            "--retry",
            metavar="SECONDS",
            min=0,
            help="Try again for so long where the server says when, or cannot be reached.",
        ),
    ] = 0.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Start restoring a prefix from storage into host memory; does not wait for it."""
    if [text, text_file, ids_file].count(None) != 2:
        raise typer.BadParameter("give exactly one of --text, --text-file and --ids-file")
    submitted: SubmitFields = {
        "operation_id": operation_id,
        "extra_key": extra_key,
        "cache_salt": cache_salt,
        "lora_path": lora_path,
        "routed_dp_rank": dp_rank,
        "ttl_s": ttl_s,
        "expected_gap_s": expected_gap_s,
        "target": target,
        "lease_s": lease_s,
        "namespace": namespace,
    }
    if ids_file is not None:
        submitted["input_ids"] = _read_ids(ids_file)
    else:
        submitted["text"] = text if text_file is None else _read_text(text_file)
    with _client(url, api_key) as toolgap:
        _print_operation(toolgap.submit(retry_for_s=retry_for_s, **submitted), as_json=as_json)


@app.command()
@guarded
def status(
    operation_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="The operation's id; without it, all active and recent ones.",
            show_default=False,
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Show one operation, or all active and recent ones and the engine."""
    with _client(url, api_key) as toolgap:
        if operation_id is None:
            _print_overview(toolgap.overview(), as_json=as_json)
        else:
            _print_operation(toolgap.status(operation_id), as_json=as_json)


@app.command()
@guarded
def wait(
    operation_id: OperationId,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Longest wait.")
    ] = 60.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Wait for an operation's outcome. Succeeds only if the whole prefix was restored."""
    with _client(url, api_key) as toolgap:
        try:
            outcome = toolgap.wait(operation_id, timeout_s)
        except TimeoutError as error:
            fail(Exit.FAILED, f"{error}; it goes on.")
    _print_operation(outcome, as_json=as_json)
    if outcome.state is not State.RESTORED:
        raise typer.Exit(Exit.FAILED)


@app.command()
@guarded
def cancel(
    operation_id: OperationId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Stop an operation's pending work; what has landed stays."""
    with _client(url, api_key) as toolgap:
        _print_operation(toolgap.cancel(operation_id), as_json=as_json)


def _read_bytes(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {name}: {error.strerror}") from None


def _read_text(name: str) -> str:
    try:
        return _read_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8: {error}") from None


def _read_ids(name: str) -> list[int]:
    try:
        return msgspec.json.decode(_read_bytes(name), type=list[int])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"{name} is no JSON list of token ids: {error}") from None


def _print_operation(status: OperationStatus, *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    reason = (
        "still going on" if status.reason is None else f"{status.reason}: {protocol.REASONS[status.reason]}"
    )
    rows = {
        "operation": status.operation_id,
        "state": status.state + " (stopping)" * status.stopping + " (waits for its turn)" * status.queued,
        "reason": reason,
        "requested": f"{status.requested_tokens} tokens, {status.aligned_tokens} in whole pages",
        "resident before": f"{status.resident_tokens} tokens",
        "found in storage": "not known yet"
        if status.found_tokens is None
        else f"{status.found_tokens} tokens",
        "read": f"{status.read_tokens} tokens ({status.inserted_tokens} kept)",
        "promoted": f"{status.promoted_tokens} tokens" if status.target is Target.DEVICE else None,
        "leased": f"{status.leased_tokens} tokens, for {status.lease_s:g} s" if status.lease_s else None,
        "used": f"{status.used_tokens} tokens",
        "joined": f"{status.joined_requests} requests",
        "elapsed": f"{status.elapsed_s:.3f} s of {status.ttl_s:g} s",
        "namespace": status.namespace,
        "replica": None if status.dp_rank is None else str(status.dp_rank),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        if value is not None:
            say(f"{name:{width}}  {value}")


def _print_overview(overview: Overview, *, as_json: bool) -> None:
    if as_json:
        print_json(overview)
        return
    engine = overview.engine
    say(f"namespace  {engine.namespace}{'  (paused)' if engine.paused else ''}")
    say(
        f"storage    {engine.storage_backend or 'none attached'}, {engine.reads_in_flight} reads in flight, "
        f"{engine.prefetch_occupied_tokens} of {engine.prefetch_capacity_tokens} tokens"
    )
    say(f"host       {engine.host_free_tokens} of {engine.host_total_tokens} tokens free")
    say(
        f"budget     {engine.budget_used_tokens} of {engine.budget_tokens} tokens to read, "
        f"{engine.leased_tokens} of {engine.max_leased_tokens} leased"
    )
    if engine.stalled_reads:
        say(f"stalled    {engine.stalled_reads} storage calls, with {engine.quarantined_tokens} tokens")
    say(f"operations {len(overview.active)} active of {engine.max_operations}, {len(overview.recent)} recent")
    if overview.active or overview.recent:
        Console(highlight=False).print(_operations_table([*overview.active, *overview.recent]))


def _operations_table(operations: Sequence[OperationStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operation", overflow="fold", ratio=1)
    for name in ("state", "reason"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "resident", "read", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for status in operations:
        table.add_row(
            escape(status.operation_id),
            status.state,
            status.reason or "-",
            str(status.requested_tokens),
            str(status.resident_tokens),
            str(status.read_tokens),
            f"{status.elapsed_s:.3f}",
        )
    return table


# ---- the server ----


def _with_settings(function: Callable[P, None]) -> Callable[P, None]:
    """Give a command one option for each of the plugin's settings, passed on by name."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                type(setting.default) | None,
                typer.Option(
                    help=f"{setting.metadata['help']} (default: ${variable(setting.name)}, else {setting.default})",
                    show_default=False,
                    rich_help_panel="Settings of Toolgap",
                ),
            ],
        )
        for setting in fields(Settings)
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


@app.command()
@_with_settings
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
    **settings: Any,
) -> None:
    """Start SGLang with Toolgap's settings, in place of this process.

    Everything after -- goes to SGLang, as in:

    toolgap serve -- --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend file
    """
    from toolgap import serve as server

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


@app.command()
@guarded
def doctor(
    arguments: SglangArguments = None,
    url: Annotated[
        str | None,
        typer.Option(help="Check this running server, instead of this environment.", show_default=False),
    ] = None,
    api_key: ApiKey = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also check whether a prefix of this length is restored.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find what keeps restores from working, and how to mend it.

    Without options it checks this Python environment.

    With SGLang's arguments after -- also those, before a server is started with them.

    With --url it checks a running server instead.
    """
    if url is not None and arguments:
        raise typer.BadParameter("--url checks a running server: leave SGLang's arguments out")
    if url is None and not arguments and prompt_tokens is not None:
        raise typer.BadParameter("--prompt-tokens needs --url or SGLang's arguments after --")
    if url is None:
        findings = _examine_environment(arguments or (), prompt_tokens)
    else:
        findings = _examine_server(url, api_key, prompt_tokens)
    if as_json:
        print_json(findings)
    else:
        _print_findings(findings)
    if has_problem(findings):
        raise typer.Exit(Exit.FAILED)


def _examine_environment(arguments: Sequence[str], prompt_tokens: int | None) -> list[Finding]:
    from toolgap import doctor
    from toolgap.sglang.internals import SUPPORTED

    # Bound to the real stderr: what SGLang's modules print meanwhile is dropped.
    with Console(file=sys.stderr).status("Importing SGLang, to check what Toolgap hooks ..."):
        installation = doctor.inspect_installation()
    findings = doctor.check_installation(installation, SUPPORTED)
    findings += doctor.check_environment(os.environ)
    if arguments:
        findings += doctor.check_arguments(arguments, prompt_tokens)
    return findings


def _examine_server(url: str, api_key: str | None, prompt_tokens: int | None) -> list[Finding]:
    from toolgap import doctor
    from toolgap.sglang.internals import SUPPORTED

    try:
        answers = doctor.ask_server(url, api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return doctor.check_server(answers, SUPPORTED, prompt_tokens)


_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def _print_findings(findings: Sequence[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.meaning)
        if finding.mend is not None:
            text += f"\n[bold]Mend:[/bold] {escape(finding.mend)}"
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.name, text)
    Console(highlight=False).print(table)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    say(f"{problems} problem{'' if problems == 1 else 's'}" if problems else "No problems.")


@app.command()
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
) -> None:
    """Watch one agent turn on a real engine, its continuation served three ways."""
    from toolgap.demo import main

    raise typer.Exit(main.run(prompt_tokens, trials, output, model=model, url=url, cpu=cpu))


app.add_typer(bench_app)
app.add_typer(hooks_app)


@app.command()
def version() -> None:
    """Show the releases of Toolgap and of SGLang."""
    from toolgap.sglang.internals import SUPPORTED

    try:
        sglang = f"{metadata.version('sglang')} is installed"
    except metadata.PackageNotFoundError:
        sglang = "is not installed"
    say(f"toolgap {metadata.version('toolgap')} (protocol {protocol.VERSION})")
    say(f"sglang {sglang}; {', '.join(SUPPORTED)} is supported")
