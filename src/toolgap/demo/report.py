"""What the demo shows and writes at its end: a table, a sentence, a chart and the raw results."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolgap.demo.trials import ARMS, INVARIANTS, Arm, Failure, Spread, Summary, Trial

TEXT_WIDTH = 80


def table(summaries: Sequence[Summary], title: str) -> Table:
    """The arms side by side, in 80 columns."""
    result = Table(
        title=escape(title),
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    result.add_column("arm", no_wrap=True)
    result.add_column("first token after\nmedian \\[min, max]", justify="right", no_wrap=True)
    for tier in ("L1", "L2", "L3"):
        result.add_column(f"from\n{tier}", justify="right", no_wrap=True)
    result.add_column("restore\nin gap", justify="right", no_wrap=True)
    result.add_column("same\noutput", justify="right", no_wrap=True)
    for summary in summaries:
        result.add_row(
            f"{summary.arm}  {ARMS[summary.arm]}",
            spread(summary.ttft_s),
            tokens(summary.device_tokens),
            tokens(summary.host_tokens),
            tokens(summary.storage_tokens),
            "-" if summary.restore_s is None else seconds(summary.restore_s.median),
            "yes" if summary.same_output else "NO",
            style="bold" if summary.arm is Arm.AHEAD else "",
        )
    return result


LEGEND = "from L1, L2, L3: cached tokens by where they came from (device, host, storage)"


def table_text(summaries: Sequence[Summary], title: str) -> str:
    """The table as plain text."""
    file = io.StringIO()
    console = Console(file=file, width=TEXT_WIDTH, no_color=True, force_terminal=False)
    console.print(table(summaries, title))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join([*lines, "", LEGEND]).strip("\n") + "\n"


def _digits(value: float) -> str:
    """Three digits, or none behind the point: more would be noise."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value: float) -> str:
    """A time, in milliseconds if it is short."""
    return f"{_digits(value)} s" if value >= 0.1 else f"{_digits(value * 1000)} ms"


def spread(values: Spread) -> str:
    """A median with its range, all in one unit."""
    factor, unit = (1.0, "s") if values.median >= 0.1 else (1000.0, "ms")
    middle, low, high = (_digits(value * factor) for value in values)
    return f"{middle} {unit} [{low}, {high}]"


def tokens(values: tuple[int, int]) -> str:
    """A count of tokens, or its range if trials differ."""
    low, high = values
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def times(slow: Spread, fast: Spread) -> str:
    """How many times as long one median is as another."""
    ratio = slow.median / fast.median
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def sentence(summaries: Sequence[Summary]) -> str:
    """What was seen, no more: where ranges overlap it says so."""
    ttft = {summary.arm: summary.ttft_s for summary in summaries}
    a, b, c = ttft[Arm.RECOMPUTE], ttft[Arm.ON_REQUEST], ttft[Arm.AHEAD]
    seen = (
        f"Restored during the tool call (C), the continuation's first token came after {seconds(c.median)}; "
        f"waiting for L3 (B) took {seconds(b.median)} and recomputing (A) {seconds(a.median)}"
    )
    trials = min(summary.trials for summary in summaries)
    verdicts = [_verdict("B", b, c), _verdict("A", a, c)]
    output = (
        "The greedy output was identical in all arms."
        if all(summary.same_output for summary in summaries)
        else "The greedy output was NOT identical in all arms."
    )
    each = "one trial an arm" if trials == 1 else f"{trials} trials an arm"
    return f"{seen} ({each}). {' '.join(verdicts)} {output}"


def _verdict(name: str, other: Spread, ahead: Spread) -> str:
    if ahead.high < other.low:
        return f"{name} took {times(other, ahead)} as long as C."
    if other.high < ahead.low:
        return f"C was slower than {name} here."
    return f"The ranges of {name} and C overlap, so nothing can be said about those two."


def write_chart(
    summaries: Sequence[Summary], trials: Sequence[Trial], title: str, paths: Sequence[Path]
) -> bool:
    """Draw the times to first token; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    axes = figure.add_subplot()
    heights = {summary.arm: len(summaries) - row for row, summary in enumerate(summaries)}
    markers = {Arm.RECOMPUTE: "s", Arm.ON_REQUEST: "^", Arm.AHEAD: "o"}
    for summary in summaries:
        height, ttft_s = heights[summary.arm], summary.ttft_s
        axes.plot([ttft_s.low, ttft_s.high], [height, height], color="black", linewidth=1, zorder=1)
        axes.plot([ttft_s.median] * 2, [height - 0.2, height + 0.2], color="black", linewidth=2.5, zorder=2)
        own = [trial.generation.ttft_s for trial in trials if trial.arm is summary.arm]
        axes.scatter(
            own,
            [height] * len(own),
            marker=markers[summary.arm],
            s=55,
            facecolor="black" if summary.arm is Arm.AHEAD else "white",
            edgecolor="black",
            zorder=3,
        )
        axes.annotate(
            seconds(ttft_s.median),
            (ttft_s.median, height + 0.24),
            ha="center",
            va="bottom",
            fontsize=11,
            fontweight="bold",
        )
    axes.set_xscale("log")
    values = [value for summary in summaries for value in (summary.ttft_s.low, summary.ttft_s.high)]
    low, high = min(values) / 1.6, max(values) * 1.6
    axes.set_xlim(low, high)
    axes.set_xticks(ticks(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0.5, len(summaries) + 0.65)
    axes.set_yticks(list(heights.values()), [_arm_label(summary) for summary in summaries], fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", which="major", color="0.88")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("seconds to the continuation's first token, logarithmic (marks: trials; bar: median)")
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    for path in paths:
        figure.savefig(path, dpi=160)
    return True


def ticks(low: float, high: float) -> list[float]:
    """Round values on a logarithmic axis: 1, 2 and 5 of each power of ten between the ends."""
    candidates = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]
    return [round(value, 6) for value in candidates if low <= value <= high]


def _arm_label(summary: Summary) -> str:
    counts = {"L1": summary.device_tokens, "L2": summary.host_tokens, "L3": summary.storage_tokens}
    found = [f"{tokens(count)} tokens from {tier}" for tier, count in counts.items() if count[1]]
    lines = [f"{summary.arm}  {ARMS[summary.arm]}", ", ".join(found) or "no token cached"]
    if summary.restore_s is not None:
        lines.append(f"restored ahead in {seconds(summary.restore_s.median)}")
    return "\n".join(lines)


def write_results(
    path: Path,
    facts: dict[str, Any],
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    failures: Sequence[Failure],
) -> None:
    """Write everything that was measured, and what it was measured on, as JSON."""
    invariants = {
        invariant: {
            "says": says,
            "held": not any(failure.invariant is invariant for failure in failures),
            "seen": [str(failure) for failure in failures if failure.invariant is invariant],
        }
        for invariant, says in INVARIANTS.items()
    }
    document = {
        **facts,
        "invariants": invariants,
        "summaries": [summary._asdict() | {"ttft_s": summary.ttft_s._asdict()} for summary in summaries],
        "trials": [trial_record(trial) for trial in trials],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def trial_record(trial: Trial) -> dict[str, Any]:
    """A trial as JSON holds it."""
    record: dict[str, Any] = msgspec.to_builtins(trial)
    record["generation"] = trial.generation._asdict()
    return record
