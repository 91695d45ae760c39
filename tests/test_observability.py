"""The dashboard and the alert rules: sound files, and no metric or label in them that is not exported."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolgap.sglang.metrics import Kind, Metric

FOLDER = Path(__file__).resolve().parent.parent / "observability"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
VARIABLES: dict[str, dict[str, Any]] = {
    variable["name"]: variable for variable in DASHBOARD["templating"]["list"]
}

SERIES: dict[str, Metric] = {
    metric.value.name + suffix: metric
    for metric in Metric
    for suffix in (("_bucket", "_sum", "_count") if metric.value.kind is Kind.HISTOGRAM else ("",))
}
GIVEN_LABELS = {"model_name", "instance"}
"""Of SGLang's scheduler metrics and of every scrape."""


def expressions() -> Iterator[str]:
    yield from QUERIES
    yield from (rule["expr"] for rule in ALERTS)
    yield from (variable["definition"] for variable in VARIABLES.values() if variable["type"] == "query")


def series_in(expression: str) -> set[str]:
    return set(re.findall(r"\bsglang:\w+", expression))


@pytest.mark.parametrize("expression", list(expressions()))
def test_a_query_names_what_is_exported(expression: str) -> None:
    found = series_in(expression)
    assert found
    assert found <= SERIES.keys()
    labels = GIVEN_LABELS.union(*(SERIES[name].value.labels for name in found))
    if any(name.endswith("_bucket") for name in found):
        labels |= {"le"}
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\"", expression))
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    assert used <= labels
    assert all(expression.count(left) == expression.count(right) for left, right in ("()", "{}", "[]"))


@pytest.mark.parametrize("expression", list(expressions()))
def test_rates_are_of_counters_and_gauges_are_read_as_they_are(expression: str) -> None:
    for name in series_in(expression):
        is_rated = re.search(rf"\b(?:rate|increase)\({re.escape(name)}\b", expression) is not None
        assert is_rated == (SERIES[name].value.kind is not Kind.GAUGE) or "label_values" in expression


def test_the_dashboard_shows_every_metric() -> None:
    shown = {SERIES[name] for query in QUERIES for name in series_in(query)}
    assert set(Metric) - shown == set()


# ---- the dashboard ----


def test_the_dashboard_has_what_grafana_needs() -> None:
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"]
    assert DASHBOARD["id"] is None, "a stored id would belong to another Grafana's dashboard"
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["time"].keys() == {"from", "to"}


def test_panels_have_their_own_ids_and_titles() -> None:
    ids = [panel["id"] for panel in PANELS]
    titles = [panel["title"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    assert all(panel["type"] in ("row", "stat", "timeseries") for panel in PANELS)


def test_panels_do_not_overlap() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        return {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}

    for panel in PANELS:
        assert cells(panel)
        assert all(0 <= x < 24 and y >= 0 for x, y in cells(panel))
    for one, other in combinations(PANELS, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_panels_ask_the_chosen_data_source() -> None:
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        if panel["type"] == "row":
            assert panel["panels"] == []
            continue
        assert panel["datasource"] == source
        assert panel["targets"]
        assert all(target["datasource"] == source for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
    assert all(VARIABLES[name]["datasource"] == source for name in ("model_name", "instance"))


def test_variables_exist_and_every_query_heeds_the_chosen_servers() -> None:
    built_in = {"__rate_interval", "__range"}
    for query in QUERIES:
        assert set(re.findall(r"\$\{?(\w+)", query)) - built_in == {"model_name", "instance"}
        selectors = re.findall(r"sglang:\w+\{([^}]*)\}", query)
        assert len(selectors) == len(re.findall(r"sglang:", query))
        assert all(re.search(r"model_name=~.*instance=~", selector) for selector in selectors)


# ---- the rules ----


def test_the_rules_are_what_prometheus_loads() -> None:
    assert RULES.keys() == {"groups"}
    groups = RULES["groups"]
    assert all(group.keys() <= {"name", "interval", "rules"} for group in groups)
    assert len({group["name"] for group in groups}) == len(groups)
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Toolgap[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"[1-9]\d*[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_what_an_alert_says_of_its_series_is_there() -> None:
    for rule in ALERTS:
        kept = set(re.findall(r"\bby \(([^)]*)\)", rule["expr"]))
        for text in rule["annotations"].values():
            for label in re.findall(r"\$labels\.(\w+)", text):
                assert label == "instance"
                assert all(label in group for group in kept)
