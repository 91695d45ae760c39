"""How long tools take: what is told, what was measured, and what progress says. No I/O."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import median

MEASURED = 16
"""Durations that are kept of each tool."""


class Gaps:
    """Expected durations of tools, by name.

    Args:
        told_s: Seconds of the tools that are known beforehand; they are believed.
    """

    def __init__(self, told_s: Mapping[str, float] | None = None) -> None:
        self._told_s = dict(told_s or {})
        self._measured_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))

    def measured(self, tool: str, seconds: float) -> None:
        """A call of this tool took so long."""
        self._measured_s[tool].append(seconds)

    def expected_s(self, tools: Iterable[str]) -> float | None:
        """How long these tools take side by side, in seconds, over 0; None if one of them is not known."""
        expected = [self._of_tool(tool) for tool in tools]
        known = [seconds for seconds in expected if seconds is not None and seconds > 0]
        return max(known) if known and len(known) == len(expected) else None

    def _of_tool(self, tool: str) -> float | None:
        if tool in self._told_s:
            return self._told_s[tool]
        measured = self._measured_s.get(tool)
        return median(measured) if measured else None


def left_s(elapsed_s: float, progress: float, total: float | None) -> float | None:
    """Seconds until a tool ends, if it goes on as it did; None if its progress does not tell."""
    if total is None or not (0 < progress <= total) or elapsed_s <= 0:
        return None
    return elapsed_s * (total - progress) / progress
