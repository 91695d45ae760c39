"""The metrics on SGLang's endpoint: right counts, Prometheus's names, and no fault that escapes."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from toolgap.operations import Operation
from toolgap.protocol import Code, Reason, State
from toolgap.sglang.metrics import PREFIX, Kind, Metric, Metrics

LABELS = {"model_name": "m", "tp_rank": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(enabled=True, labels=LABELS, registry=registry)


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Everything that is not 0, by name without the prefix and labels of its own."""
    return {
        sample.name.removeprefix(PREFIX)
        + "".join(f" {value}" for label, value in sample.labels.items() if label not in LABELS): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.value and not sample.name.endswith("_created")
    }


def operation(state: State = State.RESTORED, **fields: Any) -> Operation:
    record: dict[str, Any] = {
        "operation_id": "a",
        "fingerprint": b"",
        "namespace": "n",
        "requested_tokens": 1000,
        "aligned_tokens": 992,
        "resident_tokens": 192,
        "ttl_s": 60.0,
        "accepted_at": 100.0,
        "ended_at": 102.0,
        "state": state,
        "reason": Reason.COMPLETE,
    }
    return Operation(**record | fields)


READ: dict[str, Any] = {
    "found_tokens": 800,
    "read_tokens": 800,
    "inserted_tokens": 768,
    "dropped_tokens": 32,
    "queried_at": 100.5,
    "first_read_at": 100.75,
    "read_at": 101.5,
}


def test_an_operation_that_read(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.accepted(operation(**READ))
    metrics.ended(operation(**READ), token_bytes=100_000)
    counted = values(registry)
    assert counted.pop("operations_total restored complete") == 1
    assert {name: value for name, value in counted.items() if "bucket" not in name} == {
        "accepted_total": 1,
        "requested_tokens_total": 1000,
        "resident_tokens_total": 192,
        "found_tokens_total": 800,
        "read_tokens_total": 800,
        "inserted_tokens_total": 768,
        "dropped_tokens_total": 32,
        "duration_seconds_count": 1,
        "duration_seconds_sum": 2.0,
        "bandwidth_bytes_per_second_count": 1,
        "bandwidth_bytes_per_second_sum": 80e6,
    }
    assert "duration_seconds_bucket 1.0" not in counted
    assert counted["duration_seconds_bucket 2.5"] == 1
    assert "bandwidth_bytes_per_second_bucket 5e+07" not in counted
    assert counted["bandwidth_bytes_per_second_bucket 1e+08"] == 1


def test_an_operation_that_read_nothing_is_in_no_histogram(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    metrics.ended(operation(State.MISS, reason=Reason.NOT_IN_STORAGE, resident_tokens=0), token_bytes=100_000)
    assert values(registry) == {"operations_total miss not_in_storage": 1, "requested_tokens_total": 1000}


@pytest.mark.parametrize(
    ("token_bytes", "fields"),
    [(0, {}), (100, {"queried_at": None}), (100, {"read_at": None}), (100, {"read_at": 100.5})],
)
def test_no_bandwidth_without_a_time_or_a_size(
    metrics: Metrics, registry: CollectorRegistry, token_bytes: int, fields: dict[str, Any]
) -> None:
    metrics.ended(operation(**READ | fields), token_bytes)
    counted = values(registry)
    assert counted["duration_seconds_count"] == 1
    assert "bandwidth_bytes_per_second_count" not in counted


def test_everything_else_is_counted(metrics: Metrics, registry: CollectorRegistry) -> None:
    for _ in range(2):
        metrics.refused(Code.HOST_BUDGET)
        metrics.joined()
        metrics.promoted(16)
        metrics.used(48, 0.25)
        metrics.wasted(5)
        metrics.stalled()
    metrics.refused(Code.PAUSED)
    metrics.recovered()
    metrics.sample(1, 2, 3, 4, 5, 6, 7, 8)
    assert values(registry) == {
        "refused_total host_budget": 2,
        "refused_total paused": 1,
        "joined_requests_total": 2,
        "promoted_tokens_total": 32,
        "used_tokens_total": 96,
        "saved_seconds_total": 0.5,
        "wasted_tokens_total": 10,
        "stalls_total": 2,
        "recoveries_total": 1,
        "active_operations": 1,
        "queued_operations": 2,
        "waiting_requests": 3,
        "reading_tokens": 4,
        "budget_tokens": 5,
        "leased_tokens": 6,
        "lease_budget_tokens": 7,
        "stalled_calls": 8,
    }


def test_a_gauge_follows(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.sample(1, 2, 3, 4, 5, 6, 7, 8)
    metrics.sample(0, 0, 0, 0, 5, 0, 7, 0)
    assert values(registry) == {"budget_tokens": 5, "lease_budget_tokens": 7}


def test_every_series_but_outcomes_is_there_before_anything_happens(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """So that an increase from nothing is seen as one."""
    samples = {sample.name for family in registry.collect() for sample in family.samples}
    for metric in Metric:
        suffix = "_count" if metric.value.kind is Kind.HISTOGRAM else ""
        assert (metric.value.name + suffix in samples) == (metric is not Metric.OPERATIONS)
    codes = {sample.labels.get("code") for family in registry.collect() for sample in family.samples}
    assert codes == {None, *Code}


# ---- names ----


def test_names_are_as_prometheus_asks() -> None:
    names = [metric.value.name for metric in Metric]
    assert len(set(names)) == len(names)
    for metric in Metric:
        name, kind, text, labels, buckets = metric.value
        assert re.fullmatch(rf"{PREFIX}[a-z_]+[a-z]", name)
        assert name.endswith("_total") == (kind is Kind.COUNTER)
        assert kind is not Kind.HISTOGRAM or name.endswith(("_seconds", "_bytes_per_second", "_ratio"))
        assert text.endswith(".")
        assert not set(labels) & set(LABELS)
        assert bool(buckets) == (kind is Kind.HISTOGRAM)
        assert list(buckets) == sorted(set(buckets))


def test_the_text_format_carries_every_metric(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.ended(operation(**READ), token_bytes=1)
    text = generate_latest(registry).decode()
    for metric in Metric:
        name, kind, what, *_ = metric.value
        assert f"# HELP {name} {what}\n# TYPE {name} {kind}\n" in text
    assert f'{Metric.READ_TOKENS.value.name}{{model_name="m",tp_rank="0"}} 800.0' in text


# ---- off, and faults ----


def call_everything(metrics: Metrics) -> None:
    metrics.refused(Code.PAUSED)
    metrics.accepted(operation())
    metrics.joined()
    metrics.ended(operation(**READ), 1)
    metrics.promoted(1)
    metrics.used(1, 1.0)
    metrics.wasted(1)
    metrics.stalled()
    metrics.recovered()
    metrics.sample(1, 1, 1, 1, 1, 1, 1, 1)


def test_everything_that_is_called_is_called_here() -> None:
    public = {name for name in vars(Metrics) if not name.startswith("_")}
    assert public <= set(call_everything.__code__.co_names)


def test_where_metrics_are_off_nothing_is_registered(registry: CollectorRegistry) -> None:
    call_everything(Metrics(enabled=False, labels=LABELS, registry=registry))
    assert list(registry.collect()) == []


def test_without_prometheus_client_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = Metrics(enabled=True, labels=LABELS)
    call_everything(metrics)
    assert not metrics.enabled
    assert [record.message for record in caplog.records] == ["toolgap: no metrics of restores"]


def test_names_that_are_taken_leave_none(
    metrics: Metrics, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    second = Metrics(enabled=True, labels=LABELS, registry=registry)
    call_everything(second)
    assert not second.enabled
    metrics.joined()
    assert values(registry) == {"joined_requests_total": 1}


def test_a_fault_is_logged_once_and_never_escapes(
    metrics: Metrics, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        metrics.ended(operation(ended_at=None, reason=None), 1)
        metrics.promoted("many")  # type: ignore[arg-type]
        metrics.sample("a", 1, 1, 1, 1, 1, 1, 1)  # type: ignore[arg-type]
        metrics.ended(None, 1)  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    metrics.joined()
    assert values(registry)["joined_requests_total"] == 1


# ---- several processes, as SGLang scrapes them ----

REPLICA = """
import sys
from toolgap.sglang.metrics import Metrics

assert "prometheus_client" not in sys.modules and "sglang" not in sys.modules
metrics = Metrics(enabled=True, labels={"model_name": "m", "dp_rank": sys.argv[1]})
metrics.joined()
metrics.sample(3, 0, 0, 0, 9, 0, 0, 0)
"""

SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_the_http_process_sees_what_the_schedulers_count(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def python(*arguments: str) -> str:
        command = [sys.executable, "-c", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    python(REPLICA, "0")
    python(REPLICA, "1")
    text = python(SCRAPE)
    for rank in "01":
        labels = f'{{dp_rank="{rank}",model_name="m"}}'
        assert f"{Metric.JOINED.value.name}{labels} 1.0" in text
        assert f"{Metric.ACTIVE_OPERATIONS.value.name}{labels} 3.0" in text
