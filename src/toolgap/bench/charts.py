"""Charts that can be read in black and white."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolgap.bench.errors import BenchError
from toolgap.bench.spread import Spread

MARKERS = "so^Dv<>"
STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
ENDINGS = (".png", ".svg")


def available() -> bool:
    """Whether charts can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def figure(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    """A figure and its axes.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("charts need matplotlib: pip install 'toolgap[bench]'") from None
    result = Figure(figsize=(9, 4.8), layout="constrained")
    axes = result.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, color="0.88")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    result.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    return result, axes


def lines(axes: Any, series: Mapping[str, Mapping[float, Spread]], positions: Mapping[float, float]) -> None:
    """Medians as lines, ranges as bars; every series has a marker and a style of its own."""
    for number, (name, points) in enumerate(series.items()):
        if not points:
            continue
        x = [positions[at] for at in points]
        middle = [spread.p50 for spread in points.values()]
        below = [spread.p50 - spread.low for spread in points.values()]
        above = [spread.high - spread.p50 for spread in points.values()]
        axes.errorbar(
            x,
            middle,
            yerr=[below, above],
            label=name,
            color="black" if number % 2 == 0 else "0.45",
            linestyle=STYLES[number % len(STYLES)],
            marker=MARKERS[number % len(MARKERS)],
            markerfacecolor="black" if name == "C" else "white",
            markersize=7,
            linewidth=1.3,
            capsize=3,
        )


def ttft_by_gap(title: str, series: Mapping[str, Mapping[float, Spread]]) -> Any:
    """Times to first token over the gap, for each arm."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    result, axes = figure(title, "gap: from the tool call to the continuation", "time to first token, ms")
    gaps = sorted({gap_ms for points in series.values() for gap_ms in points})
    positions = {gap_ms: float(number) for number, gap_ms in enumerate(gaps)}
    lines(axes, series, positions)
    axes.set_xticks(list(positions.values()), [f"{gap_ms:g} ms" for gap_ms in gaps])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return result


def save(folder: Path, figures: Mapping[str, Any], digest: str) -> list[Path]:
    """Write each figure as PNG and SVG, marked with the digest of the trials that it shows."""
    paths = []
    for name, drawn in figures.items():
        for ending in ENDINGS:
            path = folder / f"{name}{ending}"
            # No date: a chart of the same trials is the same file.
            extra = {"Date": None} if ending == ".svg" else {}
            drawn.savefig(path, dpi=130, metadata={"Description": marked(digest), **extra})
            paths.append(path)
    return paths


def marked(digest: str) -> str:
    """What a chart says of where it comes from."""
    return f"drawn from trials.jsonl, SHA-256 {digest}"


def unmarked(paths: Sequence[Path], digest: str) -> list[Path]:
    """Charts that were drawn from other trials, or are missing."""
    mark = marked(digest).encode()
    return [path for path in paths if not path.is_file() or mark not in path.read_bytes()]


def distributions(title: str, label: str, series: dict[str, list[float]]) -> Any:
    """For each value the share of values that are at most that."""
    result, axes = figure(title, label, "share that is at most this")
    from matplotlib.ticker import FuncFormatter

    for number, (name, values) in enumerate(series.items()):
        ordered = sorted(values)
        axes.step(
            ordered,
            [(rank + 1) / len(ordered) for rank in range(len(ordered))],
            where="post",
            label=f"{name} ({len(ordered):,})",
            color="black" if number else "0.45",
            linestyle=STYLES[number],
            linewidth=1.5,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(0, 1.01)
    axes.legend(frameon=False, loc="lower right")
    return result
