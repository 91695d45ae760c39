from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench_trials import manifest

from toolgap.bench.errors import BenchError
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.recipes.overhead import (
    STOCK,
    TOOLGAP,
    Overhead,
    Throughput,
    allowed,
    check_room,
    judge,
    median_interval,
    of_arm,
    pairs,
)
from toolgap.bench.server import Setup

RECIPE = Overhead()
PLAN = Plan(
    recipe="overhead",
    seed=1,
    rounds=2,
    prompt_tokens=(1024,),
    gaps_ms=(0.0,),
    arms=(STOCK, TOOLGAP),
    page_tokens=16,
    page_cache="warm",
    options={"requests": 2.0, "output_tokens": 50.0},
)


def burst(arm: str = TOOLGAP, round_number: int = 0, **fields: Any) -> Throughput:
    cell = Cell(prompt_tokens=1024, arm=arm, gap_ms=0.0)
    values: dict[str, Any] = {
        "trial_id": cell.trial_id(round_number),
        "round": round_number,
        "cell": cell,
        "began_ts": 1.0,
        "plugins": "toolgap_cpu,toolgap" if arm == TOOLGAP else "toolgap_cpu",
        "endpoint": arm == TOOLGAP,
        "concurrency": 4,
        "planned_requests": 2,
        "planned_output_tokens": 50,
        "wall_s": 1.0,
        "ttft_ms": [100.0, 200.0],
        "total_ms": [500.0, 900.0],
        "output_tokens": [50, 50],
        "cached_tokens": 0,
        "outputs_sha256": f"{round_number}",
    }
    trial = Throughput(**values | fields)
    trial.invalid = judge(trial)
    return trial


def test_throughput_is_of_the_whole_burst() -> None:
    trial = burst(wall_s=0.5)
    assert (trial.tokens_per_s, trial.requests_per_s) == (200.0, 4.0)


@pytest.mark.parametrize("arm", [STOCK, TOOLGAP])
def test_a_burst_that_keeps_every_rule(arm: str) -> None:
    assert burst(arm).invalid == []


@pytest.mark.parametrize(
    ("arm", "fields", "rule"),
    [
        (TOOLGAP, {"endpoint": False}, "plugin: the server lacks"),
        (STOCK, {"endpoint": True}, "plugin: the server has"),
        (STOCK, {"planned_requests": 3}, "served: 2 of 3"),
        (STOCK, {"output_tokens": [50, 49]}, "outputs: 1 requests generated not 50 tokens but 49"),
        (STOCK, {"cached_tokens": 16}, "uncached: 16"),
    ],
)
def test_each_rule(arm: str, fields: dict[str, Any], rule: str) -> None:
    found = burst(arm, **fields).invalid
    assert len(found) == 1
    assert found[0].startswith(rule)


def test_a_burst_survives_its_file() -> None:
    trial = burst()
    assert msgspec.json.decode(msgspec.json.encode(trial), type=Throughput) == trial


def test_every_server_of_every_round_is_planned() -> None:
    found = RECIPE.planned(PLAN)
    assert found == ["r0-1024-stock-0ms", "r0-1024-toolgap-0ms", "r1-1024-stock-0ms", "r1-1024-toolgap-0ms"]
    assert burst(TOOLGAP, 1).trial_id == found[3]


def test_only_valid_bursts_of_one_round_and_size_are_a_pair() -> None:
    trials = [burst(STOCK, 0), burst(TOOLGAP, 1), burst(STOCK, 2), burst(TOOLGAP, 2, cached_tokens=1)]
    assert pairs(trials, 1024) == []
    trials += [burst(TOOLGAP, 0, wall_s=1.25)]
    (pair,) = pairs(trials, 1024)
    assert (pair.round, pair.ratio) == (0, 0.8)
    assert pairs(trials, 2048) == []


def test_the_report_pairs_by_round() -> None:
    # Medians of the servers are equal, and the rounds are not.
    trials = [burst(STOCK, 0, wall_s=1.0), burst(TOOLGAP, 0, wall_s=2.0)]
    trials += [burst(STOCK, 1, wall_s=2.0), burst(TOOLGAP, 1, wall_s=1.0)]
    trials += [burst(STOCK, 2, wall_s=1.0), burst(TOOLGAP, 2, wall_s=2.0)]
    text = RECIPE.report(manifest(plan=PLAN), trials)
    assert "| 0 | 100 | 50.0 | 0.5000 | identical |" in text
    assert "| 1 | 50.0 | 100 | 2.0000 | identical |" in text
    assert "paired by round: median 0.5000 [0.5000, 2.0000] of 3 rounds" in text
    assert "An interval of the median takes 6 rounds." in text
    assert "| stock | 100 [50.0, 100] (3) |" in text
    assert "- stock: `toolgap_cpu`\n- toolgap: `toolgap_cpu,toolgap`" in text


def test_rounds_whose_outputs_differ_are_left_out_of_the_ratio() -> None:
    trials = [burst(STOCK, 0), burst(TOOLGAP, 0), burst(STOCK, 1), burst(TOOLGAP, 1, outputs_sha256="x")]
    trials[3].wall_s = 4.0
    text = RECIPE.report(manifest(plan=PLAN), trials)
    assert "median 1.0000 [1.0000, 1.0000] of 1 rounds" in text
    assert "- round 1: ratio 0.2500" in text


def test_the_report_states_the_ranks_of_its_interval() -> None:
    trials = []
    for number in range(6):
        trials += [burst(STOCK, number), burst(TOOLGAP, number, wall_s=1.0 + number / 4)]
    text = RECIPE.report(manifest(plan=PLAN), trials)
    assert "0.4444 to 1.0000, the ratios of rank 1 and 6 of 6 (exact coverage 96.9 %)" in text


def test_the_report_of_nothing_valid() -> None:
    text = RECIPE.report(manifest(plan=PLAN), [burst(cached_tokens=1)])
    assert "No round has two valid bursts." in text


@pytest.mark.parametrize(
    ("count", "ranks"),
    # As tabulated for the sign test's interval of the median.
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (15, (4, 12)), (20, (6, 15)), (25, (8, 18))],
)
def test_ranks_of_the_interval(count: int, ranks: tuple[int, int]) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    interval = median_interval(values)
    assert interval is not None
    assert (interval.low_rank, interval.high_rank) == ranks
    assert (interval.low, interval.high) == tuple(map(float, ranks))
    assert interval.coverage >= 0.95


@pytest.mark.parametrize("count", range(6))
def test_too_few_rounds_for_an_interval(count: int) -> None:
    assert median_interval([1.0] * count) is None


def test_the_servers_differ_in_one_plugin() -> None:
    installed = ["toolgap", "toolgap_cpu", "another"]
    assert allowed(STOCK, installed) == "another,toolgap_cpu"
    assert allowed(TOOLGAP, installed) == "another,toolgap_cpu,toolgap"


def test_the_stock_server_without_other_plugins_has_a_list_that_is_not_empty() -> None:
    assert allowed(STOCK, ["toolgap"]) == "none"


def test_each_server_has_its_own_log_and_keeps_the_rest_of_the_setup() -> None:
    setup = Setup(
        "model", True, PLAN, ("--a",), {"SGLANG_PLUGINS": "toolgap", "B": "1"}, Path("x/.run.server.log")
    )
    stock, names = of_arm(setup, STOCK)
    assert stock.environment == {"SGLANG_PLUGINS": names, "B": "1"}
    assert "toolgap" not in names.split(",")
    assert stock.log == Path("x/.run.server-stock.log")
    toolgap, names = of_arm(setup, TOOLGAP)
    assert "toolgap" in names.split(",")
    assert toolgap.log != stock.log
    assert (toolgap.model, toolgap.plan, toolgap.arguments) == (setup.model, setup.plan, setup.arguments)


def test_l1_must_hold_the_requests_in_flight() -> None:
    needed = 4 * (1024 + 50 + 16)
    check_room(PLAN, needed)
    with pytest.raises(BenchError, match=f"l1_tokens={needed}"):
        check_room(PLAN, needed - 1)


def test_l1_holds_the_default_load() -> None:
    plan = msgspec.structs.replace(PLAN, options=RECIPE.defaults["options"])
    check_room(plan, Setup("model", True, plan).l1_tokens)
