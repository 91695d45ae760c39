"""The commands that start, show and stop operations."""

from typing import Annotated, Any, NoReturn

import typer

from toolgap.cli import prefix, show
from toolgap.client import DEFAULT_URL, SubmitFields, Toolgap
from toolgap.protocol import OperationStatus, State, Target
from toolgap.terminal import ApiKey, Exit, Json, Url, client, fail, finite, guarded, with_options

OperationId = Annotated[str, typer.Argument(metavar="ID", help="The operation's id.", show_default=False)]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", callback=finite, min=0, help="Longest wait.")
]


@with_options(prefix.OPTIONS)
@guarded
def submit(
    operation_id: Annotated[
        str | None,
        typer.Option("--id", help="Makes it idempotent; made by the server if left out.", show_default=False),
    ] = None,
    ttl_s: Annotated[
        float | None,
        typer.Option(
            "--ttl",
            metavar="SECONDS",
            callback=finite,
            help="Pending work stops after this.",
            show_default=False,
        ),
    ] = None,
    expected_gap_s: Annotated[
        float | None,
        typer.Option(
            "--gap",
            metavar="SECONDS",
            callback=finite,
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
            callback=finite,
            help="Hold it in host memory for so long, or until a request uses it.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Refuse unless the server's is this one.", show_default=False)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if a recompute is estimated to be as fast.")
    ] = False,
    retry_for_s: Annotated[
        float,
        typer.Option(
            "--retry",
            metavar="SECONDS",
            callback=finite,
            min=0,
            help="Try again for so long where the server says when, or cannot be reached.",
        ),
    ] = 0.0,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the outcome too, as `toolgap wait` does.")
    ] = False,
    timeout_s: Timeout = 60.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
    **named: Any,
) -> None:
    """Start restoring a prefix from storage into host memory; waits for it only with --wait."""
    fields: SubmitFields = {
        **prefix.read(named),
        "operation_id": operation_id,
        "ttl_s": ttl_s,
        "expected_gap_s": expected_gap_s,
        "target": target,
        "lease_s": lease_s,
        "namespace": namespace,
        "force": force or None,
    }
    with client(url, api_key) as toolgap:
        status = toolgap.submit(retry_for_s=retry_for_s, **fields)
        if wait:
            _end(toolgap, status.operation_id, timeout_s, as_json=as_json)
    show.operation(status, as_json=as_json)


@with_options(prefix.OPTIONS)
@guarded
def resolve(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False, **named: Any) -> None:
    """Show which tokens a prefix is, as a submit would restore them; restores nothing."""
    fields = prefix.read(named)
    with client(url, api_key) as toolgap:
        show.resolved(toolgap.resolve(**fields), as_json=as_json)


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
    with client(url, api_key) as toolgap:
        if operation_id is None:
            show.overview(toolgap.overview(), as_json=as_json)
        else:
            show.operation(toolgap.status(operation_id), as_json=as_json)


@guarded
def wait(
    operation_id: OperationId,
    timeout_s: Timeout = 60.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Wait for an operation's outcome. Succeeds only if the whole prefix was restored."""
    with client(url, api_key) as toolgap:
        _end(toolgap, operation_id, timeout_s, as_json=as_json)


def _end(toolgap: Toolgap, operation_id: str, timeout_s: float, *, as_json: bool) -> NoReturn:
    try:
        outcome: OperationStatus = toolgap.wait(operation_id, timeout_s)
    except TimeoutError as error:
        fail(Exit.FAILED, f"{error}; it goes on.")
    show.operation(outcome, as_json=as_json)
    raise typer.Exit(Exit.OK if outcome.state is State.RESTORED else Exit.FAILED)


@guarded
def cancel(
    operation_id: OperationId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Stop an operation's pending work; what has landed stays."""
    with client(url, api_key) as toolgap:
        show.operation(toolgap.cancel(operation_id), as_json=as_json)
