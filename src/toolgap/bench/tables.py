"""Markdown, as reports need it. No I/O."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Cell
from toolgap.bench.spread import Spread


class Compared(Protocol):
    """A trial whose output is compared with that of the same prompt before."""

    round: int
    cell: Cell
    reference_ids: list[int]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three digits, or none behind the point: more would be noise."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(values: Spread | None) -> str:
    """Median, range and count."""
    if values is None:
        return "-"
    return f"{number(values.p50)} [{number(values.low)}, {number(values.high)}] ({values.trials})"


def p50(values: Sequence[float]) -> str:
    """The median, or a dash."""
    return number(median(values)) if values else "-"


def ratio(over: Spread | None, under: Spread | None) -> str:
    """Of two medians."""
    return "-" if over is None or under is None or not under.p50 else f"{over.p50 / under.p50:.3f}"


def listed(title: str, items: Sequence[str]) -> str:
    """A list under a title, or nothing."""
    return "" if not items else f"{title}:\n\n" + "\n".join(f"- {item}" for item in items)


def outputs(trials: Sequence[Compared]) -> str:
    """How much the comparison of outputs can tell."""
    references = {(t.round, t.cell.prompt_tokens): tuple(t.reference_ids) for t in trials}
    return (
        f"The {len(references)} prompts have {len(set(references.values()))} different outputs of "
        f"{len(trials[0].reference_ids) if trials else 0} tokens: the fewer, the less an equal output says."
    )


def hardware(manifest: Manifest) -> str:
    """The device that computed."""
    gpus = manifest.hardware.get("gpus") or []
    cpu = str(manifest.hardware.get("cpu", "unknown CPU"))
    if manifest.engine.get("device") == "cpu" or not gpus:
        return cpu
    return f"{len(gpus)} x {gpus[0]['name']}" if len(gpus) > 1 else str(gpus[0]["name"])


def counted(counts: Counter[str]) -> str:
    """Names with their counts."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
