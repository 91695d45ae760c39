"""What a person is shown of operations and of the engine."""

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolgap import protocol
from toolgap.protocol import Divergence, EngineStatus, OperationStatus, Overview, Resolved, State, Target
from toolgap.terminal import estimated, print_json, say


def operation(status: OperationStatus, *, as_json: bool) -> None:
    """Print one operation."""
    if as_json:
        print_json(status)
    else:
        _print_rows(operation_rows(status))


def resolved(prefix: Resolved, *, as_json: bool) -> None:
    """Print which tokens a prefix is."""
    if as_json:
        print_json(prefix)
        return
    shown = list(map(str, prefix.token_ids))
    if len(shown) > 2 * _SHOWN_IDS:
        shown = [*shown[:_SHOWN_IDS], "...", *shown[-_SHOWN_IDS:]]
    _print_rows(
        {
            "tokens": str(len(prefix.token_ids)),
            "parts": _parts(prefix.stable_tokens, prefix.expected_tokens),
            "token ids": " ".join(shown),
        }
    )


_SHOWN_IDS = 8


def overview(view: Overview, *, as_json: bool) -> None:
    """Print the engine and all operations."""
    if as_json:
        print_json(view)
        return
    for engine in view.replicas or [view.engine]:
        _print_rows(engine_rows(engine))
    engine = view.engine
    say(f"operations {len(view.active)} active of {engine.max_operations}, {len(view.recent)} recent")
    if view.active or view.recent:
        Console(highlight=False).print(_table([*view.active, *view.recent]))


def _print_rows(rows: Mapping[str, str | None]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        if value is not None:
            say(f"{name:{width}}  {value}")


def operation_rows(status: OperationStatus) -> dict[str, str | None]:
    """Names and values, those left out None."""
    ended = status.reason is not None
    return {
        "operation": status.operation_id,
        "state": state(status),
        "reason": f"{status.reason}: {protocol.REASONS[status.reason]}"
        if status.reason
        else "still going on",
        "requested": f"{status.requested_tokens} tokens, {status.aligned_tokens} in whole pages",
        "parts": _parts(status.stable_tokens, status.expected_tokens),
        "resident before": f"{status.resident_tokens} tokens",
        "found in storage": "not known yet"
        if status.found_tokens is None and not ended
        else f"{status.found_tokens or 0} tokens",
        "read": f"{status.read_tokens} tokens ({status.inserted_tokens} kept)",
        "promoted": f"{status.promoted_tokens} tokens" if status.target is Target.DEVICE else None,
        "leased": f"{status.leased_tokens} tokens, for {status.lease_s:g} s" if status.lease_s else None,
        "expected": None if status.estimate is None else estimated(status.estimate),
        "used": f"{status.used_tokens} tokens"
        + ("" if status.used_after_s is None else f", after {status.used_after_s:.3f} s"),
        "joined": f"{status.joined_requests} requests",
        "continuation": _continuation(status),
        **_sides(status.divergence),
        "elapsed": f"{status.elapsed_s:.3f} s of {status.ttl_s:g} s",
        "namespace": status.namespace,
        "replica": None if status.dp_rank is None else str(status.dp_rank),
    }


def state(status: OperationStatus) -> str:
    """A state, and what it waits for."""
    notes = [
        note
        for note, holds in (
            ("stopping", status.stopping),
            ("waits for its turn", status.queued),
            ("follows another's read", status.following),
        )
        if holds
    ]
    return status.state + (f" ({', '.join(notes)})" if notes else "")


def _parts(stable_tokens: int | None, expected_tokens: int | None) -> str | None:
    if stable_tokens is None:
        return None
    return f"{stable_tokens} tokens were a prompt, {expected_tokens or 0} are the answer as it is expected"


def _continuation(status: OperationStatus) -> str | None:
    if status.matched_tokens is None:
        return None
    if status.first_divergent_token is None:
        return f"begins with all {status.matched_tokens} tokens"
    return f"begins with {status.matched_tokens} tokens, and differs from token {status.first_divergent_token} on:"


def _sides(divergence: Divergence | None) -> dict[str, str | None]:
    if divergence is None:
        return {}
    return {
        "  submitted": _side(divergence.submitted_text, divergence.submitted_ids),
        "  prompted": _side(divergence.prompted_text, divergence.prompted_ids),
    }


def _side(text: str | None, token_ids: Sequence[int]) -> str:
    """Quoted, so that white space is seen and nothing in it reaches the terminal."""
    ids = " ".join(map(str, token_ids)) or "nothing more"
    return ids if text is None else f"{json.dumps(text, ensure_ascii=False)} ({ids})"


def engine_rows(engine: EngineStatus) -> dict[str, str | None]:
    """Names and values, those left out None."""
    return {
        "namespace": engine.namespace + ("  (paused)" if engine.paused else ""),
        "replica": None if engine.dp_rank is None else str(engine.dp_rank),
        "storage": f"{engine.storage_backend or 'none attached'}, {engine.reads_in_flight} reads in flight, "
        f"{engine.prefetch_occupied_tokens} of {engine.prefetch_capacity_tokens} tokens",
        "host": f"{engine.host_free_tokens} of {engine.host_total_tokens} tokens free",
        "budget": f"{engine.budget_used_tokens} of {engine.budget_tokens} tokens to read, "
        f"{engine.leased_tokens} of {engine.max_leased_tokens} leased",
        "stalled": f"{engine.stalled_reads} storage calls, with {engine.quarantined_tokens} tokens"
        if engine.stalled_reads
        else None,
    }


STYLES = {
    State.QUERYING: "cyan",
    State.RESTORING: "bold cyan",
    State.RESTORED: "green",
    State.PARTIAL: "yellow",
    State.MISS: "yellow",
    State.CANCELLED: "dim",
    State.EXPIRED: "dim",
    State.FAILED: "bold red",
}


def _table(operations: Sequence[OperationStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operation", overflow="fold", ratio=1)
    for name in ("state", "reason"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "resident", "read", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for status in operations:
        table.add_row(
            escape(status.operation_id),
            f"[{STYLES[status.state]}]{status.state}[/]",
            status.reason or "-",
            str(status.requested_tokens),
            str(status.resident_tokens),
            str(status.read_tokens),
            f"{status.elapsed_s:.3f}",
        )
    return table
