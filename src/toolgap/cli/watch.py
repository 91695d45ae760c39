"""``toolgap watch``: operations and the engine, again and again."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolgap.cli import show
from toolgap.cli.keys import Keys
from toolgap.client import DEFAULT_URL, Toolgap, ToolgapError, ToolgapUnreachable
from toolgap.protocol import EngineStatus, OperationStatus, Overview, Reason
from toolgap.signals import Stopped, StopSignals
from toolgap.terminal import ApiKey, Exit, Url, client, finite, guarded

SHORTEST_INTERVAL_S = 0.1


@guarded
def watch(
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            callback=finite,
            min=SHORTEST_INTERVAL_S,
            help="Between two looks.",
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a look.")] = False,
) -> None:
    """Watch operations and the engine live; q or Ctrl-C ends it.

    Where stdout is no terminal, every look is printed below the last one.
    """
    console = Console(highlight=False)
    with client(url, api_key) as toolgap, _ends_by_signal():
        if as_json or once or not console.is_terminal:
            _print_looks(console, toolgap, interval_s, once=once, as_json=as_json)
        else:
            _live(console, toolgap, url, interval_s)


@contextmanager
def _ends_by_signal() -> Iterator[None]:
    """Ctrl-C is the way to end it; the other signals unwind it too, so that the terminal is left as it was."""
    try:
        with StopSignals():
            yield
    except Stopped as stop:
        interrupted = 128 + stop.number == Exit.INTERRUPTED
        raise typer.Exit(Exit.OK if interrupted else 128 + stop.number) from None


class Look(NamedTuple):
    """What was seen, and when."""

    at_s: float
    overview: Overview


def _look(toolgap: Toolgap) -> Look:
    return Look(time.monotonic(), toolgap.overview())


def _print_looks(console: Console, toolgap: Toolgap, interval_s: float, *, once: bool, as_json: bool) -> None:
    before: Look | None = None
    while True:
        now = _look(toolgap)
        if as_json:
            typer.echo(msgspec.json.encode(now.overview))
        else:
            console.print(frame(now, before, console.width))
        if once:
            return
        before = now
        time.sleep(interval_s)


def _live(console: Console, toolgap: Toolgap, url: str, interval_s: float) -> None:
    now, before, problem = _look(toolgap), None, ""
    title = Text(f"toolgap watch  {url}  every {interval_s:g} s, q ends", style="dim")
    with Keys(sys.stdin) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = [title, *([Text(problem, style="bold red", no_wrap=True)] if problem else [])]
            view = frame(now, before, console.width, console.height - len(lines))
            live.update(Group(*lines, view), refresh=True)
            if keys.pressed("q", interval_s):
                return
            try:
                now, before, problem = _look(toolgap), now, ""
            except (ToolgapError, ToolgapUnreachable) as error:
                # It goes on: a server that restarts is what one may be watching.
                problem = str(error)


# ---- the view ----

_BAR_WIDTH = 20
_WIDTH_FOR_BARS = 110


def frame(now: Look, before: Look | None, width: int, rows: int | None = None) -> RenderableType:
    """What a person sees.

    Args:
        now: The latest look.
        before: The one before it, for rates; None if there was none.
        width: Columns that there is room for: in few of them there are no bars.
        rows: Lines that there is room for; None for any number.
    """
    view = now.overview
    engines = [_engine(engine) for engine in view.replicas or [view.engine]]
    summary = f"{len(view.active)} active of {view.engine.max_operations}, {len(view.recent)} recent"
    rate = total_rate(now, before)
    if rate is not None:
        summary += f", {rate:,.0f} tokens/s read"
    operations = [*view.active, *view.recent]
    room = len(operations) if rows is None else max(rows - len(engines) - 3, 0)
    shown = operations[:room]
    parts: list[RenderableType] = [*engines, Text(summary, style="bold")]
    if shown:
        parts.append(_table(shown, now, before, bars=width >= _WIDTH_FOR_BARS))
    if left := len(operations) - len(shown):
        parts.append(Text(f"and {left} more", style="dim"))
    return Group(*parts)


def _engine(engine: EngineStatus) -> Text:
    parts = [
        "" if engine.dp_rank is None else f"replica {engine.dp_rank}",
        f"storage {engine.storage_backend or 'none'}",
        f"reads {engine.reads_in_flight}",
        f"host {engine.host_total_tokens - engine.host_free_tokens:,}/{engine.host_total_tokens:,}",
        f"budget {engine.budget_used_tokens:,}/{engine.budget_tokens:,}",
        f"leases {engine.leased_tokens:,}/{engine.max_leased_tokens:,}",
        f"joins {engine.waiting_joins}" if engine.waiting_joins else "",
    ]
    line = Text(no_wrap=True, overflow="ellipsis")
    # Trouble comes first, so that it is seen on a narrow terminal too.
    if engine.paused:
        line.append("paused  ", style="bold yellow")
    if engine.stalled_reads:
        line.append(
            f"{engine.stalled_reads} stalled with {engine.quarantined_tokens:,} tokens  ", style="bold red"
        )
    return line.append("  ".join(filter(None, parts)))


def _table(operations: list[OperationStatus], now: Look, before: Look | None, *, bars: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operation", min_width=8)
    table.add_column("state", no_wrap=True)
    if bars:
        table.add_column("", width=_BAR_WIDTH)
    for name in ("tokens", "read/s", "seconds", "due", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", min_width=6)
    for status in operations:
        rate = read_rate(status, now, before)
        due_s = _due_s(status)
        landed = landed_tokens(status)
        bar = ProgressBar(
            max(status.aligned_tokens, 1),
            landed,
            width=_BAR_WIDTH,
            complete_style="cyan",
            finished_style="green",
        )
        table.add_row(
            _cut(status.operation_id),
            Text(_state(status), style=show.STYLES[status.state]),
            *([bar] if bars else []),
            f"{landed:,}/{status.aligned_tokens:,}",
            "" if rate is None else f"{rate:,.0f}",
            f"{status.elapsed_s:.1f}",
            "" if due_s is None else f"{due_s:.1f}",
            f"{status.used_tokens:,}" if status.state.terminal else "",
            _cut(_reason(status)),
        )
    return table


def _due_s(status: OperationStatus) -> float | None:
    """Until the continuation is expected; None if nobody said when, or it matters no more."""
    estimate = status.estimate
    # Without an expected gap the TTL stands in its place.
    if estimate is None or status.state.terminal or estimate.gap_s >= status.ttl_s:
        return None
    return estimate.gap_s - status.elapsed_s


def _cut(text: str) -> Text:
    """It gives way where there is little room, and never takes a second line."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _state(status: OperationStatus) -> str:
    if status.state.terminal:
        return status.state
    if status.stopping:
        return "stopping"
    return "queued" if status.queued else "following" if status.following else status.state


def _reason(status: OperationStatus) -> str:
    if status.first_divergent_token is not None:
        return f"diverged at token {status.first_divergent_token:,}"
    return "" if status.reason in (None, Reason.COMPLETE) else str(status.reason)


def landed_tokens(status: OperationStatus) -> int:
    """Of the aligned prefix, what was resident or has been read, as far as it was kept."""
    read = status.inserted_tokens if status.state.terminal else status.read_tokens
    return min(status.resident_tokens + read, status.aligned_tokens)


def read_rate(status: OperationStatus, now: Look, before: Look | None) -> float | None:
    """Tokens a second that an operation has read since the look before; None if it has not."""
    if before is None or now.at_s <= before.at_s:
        return None
    read = status.read_tokens - _read_by_then(before).get(status.operation_id, 0)
    return read / (now.at_s - before.at_s) if read > 0 else None


def total_rate(now: Look, before: Look | None) -> float | None:
    """Tokens a second that all operations have read since the look before."""
    if before is None or now.at_s <= before.at_s:
        return None
    operations = [*now.overview.active, *now.overview.recent]
    return sum(read_rate(status, now, before) or 0.0 for status in operations)


def _read_by_then(look: Look) -> dict[str, int]:
    operations = [*look.overview.active, *look.overview.recent]
    return {status.operation_id: status.read_tokens for status in operations}
