"""The gateway's own metrics, in a registry of their own: several gateways may be in one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from toolgap.gateway.events import Event, Hinted, Known, Paused, Refused, Returned, Submitted
from toolgap.gateway.observer import Recorder
from toolgap.gateway.proxy import API_PATHS, Exchange
from toolgap.gateway.upstreams import Health, Upstream

PREFIX = "toolgap_gateway_"
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
GAP_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """What is counted. No label's value comes from a client, so their number is bounded.

    Args:
        upstreams: URLs of all upstreams.
    """

    def __init__(self, upstreams: tuple[str, ...]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        self.exchanges = counter(
            "exchanges", "Requests by what was asked for and how they ended.", "path", "status", "ending"
        )
        self.failovers = counter(
            "failovers", "Servers that could not be connected to, and another was tried."
        )
        self.observer_errors = counter("observer_errors", "Exceptions of what looks at the traffic.")
        self.unseen = counter("unseen_exchanges", "Exchanges that were not looked at to their end.")
        self.request_bytes = counter("request_body_bytes", "Bytes of request bodies.")
        self.response_bytes = counter("response_body_bytes", "Bytes of response bodies.")
        self.running = Gauge(PREFIX + "running", "Requests under way.", registry=self.registry)
        self.health = Gauge(
            PREFIX + "upstream_health",
            "1 for how an upstream is.",
            ("upstream", "health"),
            registry=self.registry,
        )
        self.first_byte = Histogram(
            PREFIX + "headers_seconds",
            "Until an upstream's answer began.",
            registry=self.registry,
            buckets=SECONDS,
        )
        self.turns = counter("turns", "Answers with tool calls.")
        self.gaps = Histogram(
            PREFIX + "gap_seconds",
            "From a tool call's leaving to the continuation.",
            registry=self.registry,
            buckets=GAP_SECONDS,
        )
        self.submitted = counter("restores_submitted", "Restores that a server has accepted.")
        self.restores = counter("restores", "Restores by how they ended.", "state", "reason")
        self.refused = counter("restores_refused", "Restores that could not be asked for, by why.", "code")
        self.hints = counter("hints", "Hints about the end of a gap.", "kind")
        self.restored_tokens = counter("restored_tokens", "Tokens that restores brought into host memory.")
        self.used_tokens = counter("used_tokens", "Of those, used by the continuation.")
        self.joined = counter("joined_requests", "Continuations that came early and joined a restore.")
        for url in upstreams:
            self._show(url, Health.UNKNOWN)

    def show_recording(self, recording: Recorder) -> None:
        """Show how many turns a recording has."""
        for name, text, read in (
            ("recorded_turns", "Turns that were recorded.", lambda: float(recording.turns)),
            ("lost_turns", "Turns that could not be recorded.", lambda: float(recording.lost)),
        ):
            Gauge(PREFIX + name, text, registry=self.registry).set_function(read)

    def began(self) -> None:
        """A request arrived."""
        self.running.inc()

    def ended(self, exchange: Exchange) -> None:
        """Its exchange is over."""
        self.running.dec()
        path = exchange.path if exchange.path in API_PATHS else "other"
        self.exchanges.labels(path, str(exchange.status or ""), exchange.ending.value).inc()
        self.failovers.inc(exchange.failovers)
        self.request_bytes.inc(exchange.sent_bytes)
        self.response_bytes.inc(exchange.received_bytes)
        if exchange.headers_s is not None and exchange.refusal is None:
            self.first_byte.observe(exchange.headers_s)

    def health_changed(self, upstream: Upstream) -> None:
        """An upstream is otherwise than it was."""
        self._show(upstream.url, upstream.health)

    def listen(self, event: Event) -> None:
        """Something was seen, or done, about restores."""
        match event:
            case Paused():
                self.turns.inc()
            case Returned():
                self.gaps.observe(max(event.gap_s, 0.0))
            case Submitted():
                self.submitted.inc()
            case Refused():
                self.refused.labels(event.code).inc()
            case Hinted():
                self.hints.labels("progress" if event.left_s else "ended").inc()
            case Known(final=False):
                status = event.status
                self.restores.labels(status.state.value, (status.reason or "")).inc()
                self.restored_tokens.inc(status.inserted_tokens)
            case Known(final=True):
                self.used_tokens.inc(event.status.used_tokens)
                self.joined.inc(event.status.joined_requests)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)

    def _show(self, url: str, health: Health) -> None:
        for one in Health:
            self.health.labels(url, one.value).set(one is health)
