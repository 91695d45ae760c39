"""Restores on SGLang's own Prometheus endpoint, in its naming and with its labels.

:class:`Metric` is the one definition of what is exported; docs, dashboard and alert rules are checked
against it. Neither SGLang nor, before it is asked to count, prometheus_client is imported here: SGLang
has to set ``PROMETHEUS_MULTIPROC_DIR`` first.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec

from toolgap.operations import Operation
from toolgap.protocol import Code, Reason

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

P = ParamSpec("P")

PREFIX = "sglang:hicache_restore_"


class Kind(StrEnum):
    """What Prometheus takes a metric for."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Definition(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Beside those that SGLang's scheduler metrics have."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""


def _counter(name: str, text: str, *labels: str) -> Definition:
    return Definition(f"{PREFIX}{name}_total", Kind.COUNTER, text, labels)


def _gauge(name: str, text: str) -> Definition:
    return Definition(f"{PREFIX}{name}", Kind.GAUGE, text)


def _histogram(name: str, text: str, *buckets: float) -> Definition:
    return Definition(f"{PREFIX}{name}", Kind.HISTOGRAM, text, buckets=buckets)


class Metric(Enum):
    """Everything that is exported."""

    value: Definition

    ACCEPTED = _counter("accepted", "Submits that became an operation.")
    REFUSED = _counter("refused", "Submits that were refused, by error code.", "code")
    OPERATIONS = _counter("operations", "Operations that ended, by state and reason.", "state", "reason")
    JOINED = _counter("joined_requests", "Requests that waited for an operation's read.")

    REQUESTED_TOKENS = _counter("requested_tokens", "Length of the prefixes of operations that ended.")
    RESIDENT_TOKENS = _counter("resident_tokens", "Of those, resident already at submission.")
    FOUND_TOKENS = _counter("found_tokens", "Found in storage behind the resident part.")
    READ_TOKENS = _counter("read_tokens", "Read from storage by operations.")
    INSERTED_TOKENS = _counter("inserted_tokens", "Of those, new in host memory.")
    DROPPED_TOKENS = _counter(
        "dropped_tokens", "Of those, given back: resident by then, or without a parent."
    )
    PROMOTED_TOKENS = _counter("promoted_tokens", "Loaded back from host memory to the device by operations.")
    USED_TOKENS = _counter("used_tokens", "Of the inserted ones, used by a request.")
    WASTED_TOKENS = _counter(
        "wasted_tokens", "Of the inserted ones, used by no request while their operation was remembered."
    )
    SAVED_SECONDS = _counter(
        "saved_seconds", "Estimate of the reading time that requests were spared by what they used."
    )

    DURATION = _histogram(
        "duration_seconds",
        "From acceptance to the end, of operations that read something.",
        *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    )
    BANDWIDTH = _histogram(
        "bandwidth_bytes_per_second",
        "KV bytes of one rank read by an operation, over the time from storage's answer to the last page.",
        *(1e7, 2.5e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10),
    )

    ESTIMATE_RATIO = _histogram(
        "estimate_ratio",
        "Duration of an operation that read all it was to read, over what was expected when it was submitted.",
        *(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
    )

    ACTIVE_OPERATIONS = _gauge("active_operations", "Operations that have not ended.")
    QUEUED_OPERATIONS = _gauge("queued_operations", "Of those, the ones whose read has not begun.")
    WAITING_REQUESTS = _gauge("waiting_requests", "Requests that wait for an operation.")
    READING_TOKENS = _gauge("reading_tokens", "Host memory that active operations read into.")
    BUDGET_TOKENS = _gauge("budget_tokens", "Host memory that they may read into.")
    LEASED_TOKENS = _gauge("leased_tokens", "Host memory that leases hold.")
    LEASE_BUDGET_TOKENS = _gauge("lease_budget_tokens", "Host memory that leases may hold.")
    STALLED_CALLS = _gauge("stalled_calls", "Storage calls that were given up and have not returned.")
    STALLS = _counter("stalls", "Storage calls that were given up as hanging.")
    RECOVERIES = _counter("recoveries", "Of those, the ones that returned or whose reader was replaced.")


_SAMPLED = (
    Metric.ACTIVE_OPERATIONS,
    Metric.QUEUED_OPERATIONS,
    Metric.WAITING_REQUESTS,
    Metric.READING_TOKENS,
    Metric.BUDGET_TOKENS,
    Metric.LEASED_TOKENS,
    Metric.LEASE_BUDGET_TOKENS,
    Metric.STALLED_CALLS,
)
"""In the order of :meth:`Metrics.sample`'s arguments."""


def _never_raises(
    method: Callable[Concatenate["Metrics", P], None],
) -> Callable[Concatenate["Metrics", P], None]:
    """Do nothing where metrics are off, and keep faults from the caller; the first one is logged."""

    @functools.wraps(method)
    def guarded(self: "Metrics", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.enabled:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("toolgap: a metric could not be counted; the next ones fail silently")

    return guarded


class Metrics:
    """Counts what restores do. Methods are cheap and never raise; where metrics are off they do nothing.

    Args:
        enabled: Whether this process exports metrics, and counts for its replica.
        labels: Labels of every metric, with their values.
        registry: Where to register; prometheus_client's default one, as SGLang does, if left out.
    """

    def __init__(
        self, *, enabled: bool, labels: Mapping[str, str], registry: "CollectorRegistry | None" = None
    ) -> None:
        self.enabled = enabled
        self._has_failed = False
        self._sample: tuple[int, ...] = ()
        if enabled:
            try:
                self._register(labels, registry)
            except Exception:
                self.enabled = False
                logger.exception("toolgap: no metrics of restores")

    def _register(self, labels: Mapping[str, str], registry: "CollectorRegistry | None") -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        self._values = tuple(map(str, labels.values()))
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}
        self._histograms: dict[Metric, Histogram] = {}
        target = REGISTRY if registry is None else registry
        for metric in Metric:
            name, kind, text, own, buckets = metric.value
            names = (*labels, *own)
            match kind:
                case Kind.COUNTER:
                    counter = Counter(name, text, names, registry=target)
                    # What has no labels of its own shows as 0 from the start, as SGLang's do.
                    self._counters[metric] = counter if own else counter.labels(*self._values)
                case Kind.GAUGE:
                    gauge = Gauge(name, text, names, registry=target, multiprocess_mode="mostrecent")
                    self._gauges[metric] = gauge.labels(*self._values)
                case Kind.HISTOGRAM:
                    histogram = Histogram(name, text, names, registry=target, buckets=buckets)
                    self._histograms[metric] = histogram.labels(*self._values)
        for code in Code:
            self._counters[Metric.REFUSED].labels(*self._values, code)

    def _count(self, metric: Metric, amount: float = 1) -> None:
        if amount > 0:
            self._counters[metric].inc(amount)

    # ---- what the restorer tells ----

    @_never_raises
    def refused(self, code: Code) -> None:
        """A submit was refused."""
        self._counters[Metric.REFUSED].labels(*self._values, code).inc()

    @_never_raises
    def accepted(self, operation: Operation) -> None:
        """A submit became an operation."""
        self._count(Metric.ACCEPTED)

    @_never_raises
    def joined(self) -> None:
        """A request joined an operation."""
        self._count(Metric.JOINED)

    @_never_raises
    def ended(self, operation: Operation, token_bytes: int) -> None:
        """An operation has its outcome.

        Args:
            operation: Its record.
            token_bytes: KV bytes a token on this rank; 0 if unknown.
        """
        assert operation.reason is not None
        assert operation.ended_at is not None
        self._counters[Metric.OPERATIONS].labels(*self._values, operation.state, operation.reason).inc()
        self._count(Metric.REQUESTED_TOKENS, operation.requested_tokens)
        self._count(Metric.RESIDENT_TOKENS, operation.resident_tokens)
        self._count(Metric.FOUND_TOKENS, operation.found_tokens or 0)
        self._count(Metric.READ_TOKENS, operation.read_tokens)
        self._count(Metric.INSERTED_TOKENS, operation.inserted_tokens)
        self._count(Metric.DROPPED_TOKENS, operation.dropped_tokens)
        if not operation.read_tokens:
            return
        self._histograms[Metric.DURATION].observe(operation.ended_at - operation.accepted_at)
        if operation.estimate is not None and operation.reason is Reason.COMPLETE:
            self._histograms[Metric.ESTIMATE_RATIO].observe(
                (operation.ended_at - operation.accepted_at) / max(operation.estimate.restore_s, 1e-6)
            )
        if operation.read_at is None or operation.queried_at is None:
            return
        read_s = operation.read_at - operation.queried_at
        if read_s > 0 and token_bytes > 0:
            self._histograms[Metric.BANDWIDTH].observe(operation.read_tokens * token_bytes / read_s)

    @_never_raises
    def promoted(self, tokens: int) -> None:
        """Tokens were loaded back to the device for an operation."""
        self._count(Metric.PROMOTED_TOKENS, tokens)

    @_never_raises
    def used(self, tokens: int, saved_s: float) -> None:
        """A request used tokens that an operation had inserted.

        Args:
            tokens: Those that no request had used before.
            saved_s: Estimate of the reading time that the request was spared.
        """
        self._count(Metric.USED_TOKENS, tokens)
        self._count(Metric.SAVED_SECONDS, saved_s)

    @_never_raises
    def wasted(self, tokens: int) -> None:
        """Inserted tokens that no request used while their operation was remembered."""
        self._count(Metric.WASTED_TOKENS, tokens)

    @_never_raises
    def stalled(self) -> None:
        """A storage call was given up as hanging."""
        self._count(Metric.STALLS)

    @_never_raises
    def recovered(self) -> None:
        """A hanging storage call returned, or its reader was replaced."""
        self._count(Metric.RECOVERIES)

    @_never_raises
    def sample(
        self,
        active: int,
        queued: int,
        waiting_joins: int,
        reading_tokens: int,
        budget_tokens: int,
        leased_tokens: int,
        lease_budget_tokens: int,
        stalled_calls: int,
    ) -> None:
        """How things stand now; writes nothing while they stand as they did."""
        sample = (
            active,
            queued,
            waiting_joins,
            reading_tokens,
            budget_tokens,
            leased_tokens,
            lease_budget_tokens,
            stalled_calls,
        )
        if sample == self._sample:
            return
        for metric, value in zip(_SAMPLED, sample, strict=True):
            self._gauges[metric].set(value)
        self._sample = sample
