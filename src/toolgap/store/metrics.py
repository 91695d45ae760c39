"""What a store counts, on SGLang's own Prometheus endpoint.

prometheus_client is imported no earlier than a server asks for metrics: SGLang sets its multi-process folder first.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from toolgap.store.stats import StoreStats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

logger = logging.getLogger(__name__)

PREFIX = "sglang:hicache_store_"

LABELS = ("tp_rank", "pp_rank", "dp_rank")
"""Of every metric."""


class Definition(NamedTuple):
    """One metric, and the field of :class:`StoreStats` that it shows."""

    name: str
    field: str
    help: str


COUNTERS = (
    Definition(f"{PREFIX}read_pages_total", "read_pages", "Pages read, each checked."),
    Definition(f"{PREFIX}read_bytes_total", "read_bytes", "Bytes of them."),
    Definition(f"{PREFIX}read_seconds_total", "read_s", "Time that SGLang's threads waited for them."),
    Definition(f"{PREFIX}missed_pages_total", "missed_pages", "Pages asked for and not there."),
    Definition(f"{PREFIX}written_pages_total", "written_pages", "Pages written."),
    Definition(f"{PREFIX}written_bytes_total", "written_bytes", "Bytes of them."),
    Definition(f"{PREFIX}write_seconds_total", "write_s", "Time that SGLang's thread waited for them."),
    Definition(f"{PREFIX}evicted_pages_total", "evicted_pages", "Pages evicted to keep the limit."),
    Definition(
        f"{PREFIX}damaged_pages_total", "damaged_pages", "Pages that failed their check: misses from then on."
    ),
    Definition(
        f"{PREFIX}cancelled_pages_total", "cancelled_pages", "Pages that were cancelled before their read."
    ),
)
FAILURES = Definition(
    f"{PREFIX}failed_pages_total", "failures", "Pages that were not read or not written, by `reason`."
)
GAUGES = (
    Definition(f"{PREFIX}pages", "pages", "Pages in the folder, of all servers."),
    Definition(f"{PREFIX}used_bytes", "used_bytes", "Bytes of them on the disk."),
    Definition(f"{PREFIX}writable", "writable", "Whether the folder can be written."),
)
DEFINITIONS = (*COUNTERS, FAILURES, *GAUGES)


class StoreMetrics:
    """Shows one store's counts; never raises."""

    def __init__(self, labels: Mapping[str, str], registry: "CollectorRegistry | None" = None) -> None:
        self._labels = dict(labels)
        self._lock = threading.Lock()
        self._shown = StoreStats()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._failures: Counter | None = None
        try:
            self._register(registry)
        except Exception:
            logger.exception("toolgap store: no metrics")

    def _register(self, registry: "CollectorRegistry | None") -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        target = REGISTRY if registry is None else registry
        for name, field, text in COUNTERS:
            self._counters[field] = Counter(name, text, tuple(self._labels), registry=target).labels(
                **self._labels
            )
        for name, field, text in GAUGES:
            self._gauges[field] = Gauge(
                name, text, tuple(self._labels), registry=target, multiprocess_mode="mostrecent"
            ).labels(**self._labels)
        self._failures = Counter(FAILURES.name, FAILURES.help, (*self._labels, "reason"), registry=target)

    def anew(self) -> None:
        """Another store is shown from now on: what it counts begins at nothing."""
        self._shown = StoreStats()

    def show(self, stats: Callable[[], StoreStats]) -> None:
        """What the store counts now, by its own word; from any thread."""
        # Asked for under the lock: of two threads, neither may show what is older than what the other has shown.
        with self._lock:
            self._show(stats())

    def _show(self, stats: StoreStats) -> None:
        before, self._shown = self._shown, stats
        for field, counter in self._counters.items():
            counter.inc(max(0, getattr(stats, field) - getattr(before, field)))
        for field, gauge in self._gauges.items():
            gauge.set(float(getattr(stats, field)))
        if self._failures is not None:
            for reason, count in stats.failures.items():
                self._failures.labels(**self._labels, reason=reason).inc(
                    max(0, count - before.failures.get(reason, 0))
                )
