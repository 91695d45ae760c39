from prometheus_client import CollectorRegistry

from toolgap.store.metrics import DEFINITIONS, LABELS, StoreMetrics
from toolgap.store.stats import StoreStats

RANKS = dict.fromkeys(LABELS, "0")


def test_what_a_store_counts_is_shown_as_it_grows() -> None:
    registry = CollectorRegistry()
    metrics = StoreMetrics(RANKS, registry)

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"sglang:hicache_store_{name}", RANKS | more)

    assert value("damaged_pages_total") == 0
    metrics.show(lambda: StoreStats(read_pages=3, damaged_pages=1, pages=7, failures={"checksum": 1}))
    metrics.show(
        lambda: StoreStats(read_pages=5, damaged_pages=1, pages=6, failures={"checksum": 1, "EIO": 2})
    )
    assert (value("read_pages_total"), value("damaged_pages_total"), value("pages")) == (5, 1, 6)
    assert value("failed_pages_total", reason="EIO") == 2
    assert value("writable") == 1

    # A store that is attached anew counts from nothing.
    metrics.anew()
    metrics.show(lambda: StoreStats(read_pages=2, failures={"EIO": 1}))
    assert value("read_pages_total") == 7
    assert value("failed_pages_total", reason="EIO") == 3


def test_every_definition_is_a_field_that_stores_have() -> None:
    assert {metric.field for metric in DEFINITIONS} <= set(StoreStats.__struct_fields__)


def test_names_that_are_taken_cost_the_metrics_alone() -> None:
    registry = CollectorRegistry()
    StoreMetrics(RANKS, registry)
    StoreMetrics(RANKS, registry).show(lambda: StoreStats(read_pages=1))
