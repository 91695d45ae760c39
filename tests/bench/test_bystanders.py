import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from bench_trials import manifest

from toolgap.bench.plan import Cell, Plan
from toolgap.bench.recipes.bystanders import WITH, WITHOUT, Bystanders, Restorer, Restores, Window, judge
from toolgap.bench.validity import COUNTERS, PREFETCHED
from toolgap.client import Toolgap, ToolgapError
from toolgap.protocol import Code, Error, ErrorReply, OperationStatus, Reason, State

RECIPE = Bystanders()
PLAN = Plan(
    recipe="bystanders",
    seed=1,
    rounds=2,
    prompt_tokens=(4096,),
    gaps_ms=(0.0,),
    arms=(WITHOUT, WITH),
    page_tokens=16,
    page_cache="warm",
    options={"window_s": 4.0, "bystander_output_tokens": 3.0},
)


def window(arm: str = WITH, round_number: int = 0, **fields: Any) -> Window:
    cell = Cell(prompt_tokens=4096, arm=arm, gap_ms=0.0)
    read = 8160 if arm == WITH else 0
    ran = Restores(states={"restored": 2}, elapsed_ms=[400.0, 600.0], read_tokens=read, restoring_s=4.0)
    values: dict[str, Any] = {
        "trial_id": cell.trial_id(round_number),
        "round": round_number,
        "cell": cell,
        "began_ts": 1.0,
        "page_cache": "warm",
        "page_cache_share": 1.0,
        "window_s": 4.0,
        "rate_per_s": 1.0,
        "bystander_prompt_tokens": 256,
        "bystander_output_tokens": 3,
        "planned_requests": 3,
        "due_s": [0.5, 1.5, 2.5],
        "late_ms": [0.1, 0.2, 90.0],
        "ttft_ms": [10.0, 20.0, 30.0],
        "output_tokens": [3, 3, 3],
        "itl_ms": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "cached_tokens": 0,
        "outputs_sha256": f"{round_number}",
        "restored_prompts": 6,
        "restores": ran if arm == WITH else Restores(),
        "counters": dict.fromkeys(COUNTERS, 0.0) | {PREFETCHED: float(read)},
    }
    trial = Window(**values | fields)
    trial.invalid = judge(trial)
    return trial


@pytest.mark.parametrize("arm", [WITH, WITHOUT])
def test_a_window_that_keeps_every_rule(arm: str) -> None:
    assert window(arm).invalid == []


@pytest.mark.parametrize(
    ("arm", "fields", "rule"),
    [
        (WITHOUT, {"planned_requests": 4}, "served: 3 of 4"),
        (WITHOUT, {"planned_requests": 0, "ttft_ms": []}, "served: 0 of 0"),
        (WITHOUT, {"output_tokens": [3, 2, 3]}, "outputs: 1 requests generated not 3 tokens but 2"),
        (WITHOUT, {"cached_tokens": 16}, "uncached: 16"),
        (WITHOUT, {"late_ms": [0.1, 50.0, 90.0]}, "late: requests left 50 ms"),
        (WITHOUT, {"counters": {PREFETCHED: 16.0}}, "alone: 16.0"),
        (WITHOUT, {"restores": Restores(states={"miss": 1})}, "alone: 0.0"),
        (WITH, {"restores": Restores(), "counters": {PREFETCHED: 0.0}}, "restores: none"),
        (WITH, {"restores": Restores(states={"miss": 9}), "counters": {PREFETCHED: 0.0}}, "restores: none"),
        (WITH, {"counters": {PREFETCHED: 8144.0}}, "reads: the engine counted 8144.0 and not 8160"),
    ],
)
def test_each_rule(arm: str, fields: dict[str, Any], rule: str) -> None:
    found = window(arm, **fields).invalid
    assert len(found) == 1
    assert found[0].startswith(rule)


def test_a_window_survives_its_file() -> None:
    trial = window()
    assert msgspec.json.decode(msgspec.json.encode(trial), type=Window) == trial


def test_every_arm_of_every_round_is_planned() -> None:
    found = RECIPE.planned(PLAN)
    assert found == ["r0-4096-without-0ms", "r0-4096-with-0ms", "r1-4096-without-0ms", "r1-4096-with-0ms"]
    assert window(WITH, 1).trial_id == found[3]


def double(round_number: int = 0, **fields: Any) -> Window:
    """As without restores, and every time twice as long."""
    return window(WITH, round_number, ttft_ms=[20.0, 40.0, 60.0], itl_ms=[2.0, 4.0, 6.0, 8.0], **fields)


def rows(text: str, first: str) -> list[list[str]]:
    return [
        cells[1:]
        for line in text.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] == first
    ]


def test_the_report_pools_the_requests_of_both_arms() -> None:
    text = RECIPE.report(manifest(plan=PLAN), [window(WITHOUT), double(), window(WITHOUT, 1)])
    assert rows(text, "without restores") == [["2", "6", "20.0", "30.0", "3.50", "6.00"]]
    assert rows(text, "with restores") == [["1", "3", "40.0", "60.0", "5.00", "8.00"]]
    assert rows(text, "with / without") == [["", "", "2.000", "2.000", "1.429", "1.333"]]


def test_the_report_pairs_the_windows_of_a_round() -> None:
    same = window(WITH, 1)
    text = RECIPE.report(manifest(plan=PLAN), [double(), window(WITHOUT), same, window(WITHOUT, 1)])
    assert rows(text, "0") == [["2.000", "2.000", "1.429", "1.333"]]
    assert rows(text, "1") == [["1.000"] * 4]
    assert rows(text, "median [least, most]")[0][0] == "1.500 [1.000, 2.000]"
    assert "identical in both windows of 2 of 2 rounds" in text


def test_the_report_says_what_was_restored() -> None:
    refused = window(WITH, 1)
    refused.restores = Restores(
        states={"partial": 1},
        elapsed_ms=[800.0],
        read_tokens=80,
        resident=3,
        refused={"host_budget": 2},
        restoring_s=4.0,
    )
    text = RECIPE.report(manifest(plan=PLAN), [window(), refused])
    assert "Restores: 3 (1 partial, 2 restored), each in 600 [400, 800] (3) ms" in text
    assert "they read 8,240 tokens, 1,030 a second" in text
    assert "3 submits found their prefix resident" in text
    assert "refused and tried again: 2 host_budget." in text


def test_an_invalid_window_is_in_no_figure() -> None:
    wrong = window(WITH, 1, cached_tokens=16, ttft_ms=[900.0] * 3)
    trials = [window(WITHOUT), window(), window(WITHOUT, 1), wrong]
    text = RECIPE.report(manifest(plan=PLAN), trials)
    assert rows(text, "with restores")[0][:2] == ["1", "3"]
    assert rows(text, "1") == []
    with_figure = RECIPE.figures(manifest(plan=PLAN), trials)[1]
    assert (with_figure.trials, with_figure.invalid, with_figure.ttft_ms_max) == (1, 1, 30.0)


def test_the_figures_name_their_arm() -> None:
    found = RECIPE.figures(manifest(plan=PLAN), [window(WITHOUT)])
    assert [(f.arm, f.gap_ms, f.ttft_ms_p50, f.trials) for f in found] == [
        ("bystander without restores", 0.0, 20.0, 1),
        ("bystander with restores", 0.0, None, 0),
    ]


def test_the_report_of_nothing_valid() -> None:
    assert "## Validity" in RECIPE.report(manifest(plan=PLAN), [window(cached_tokens=1)])


def test_the_charts_have_both_arms() -> None:
    found = RECIPE.charts(manifest(plan=PLAN), [window(WITHOUT), double()])
    assert sorted(found) == ["bystanders-itl-4096", "bystanders-ttft-4096"]
    lines = found["bystanders-ttft-4096"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["without restores (3)", "with restores (3)"]
    assert len({line.get_linestyle() for line in lines}) == 2


def operation(prefix: list[int], **fields: Any) -> OperationStatus:
    values: dict[str, Any] = {
        "operation_id": f"op-{prefix[0]}",
        "state": State.QUERYING,
        "requested_tokens": len(prefix),
        "aligned_tokens": len(prefix),
        "resident_tokens": 0,
        "ttl_s": 60.0,
        "elapsed_s": 0.0,
        "namespace": "n",
    }
    return OperationStatus(**values | fields)


class Endpoint:
    """Answers submits in turn with what it is given, and every status with a restored operation."""

    def __init__(self, *submits: Callable[[list[int]], httpx.Response]) -> None:
        self.submitted: list[list[int]] = []
        self._submits: Iterator[Callable[[list[int]], httpx.Response]] = iter(submits)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content)
        if body["action"] == "status":
            done = operation(
                [0], state=State.RESTORED, reason=Reason.COMPLETE, read_tokens=16, elapsed_s=0.25
            )
            return httpx.Response(200, content=msgspec.json.encode(done))
        self.submitted.append(body["input_ids"])
        return next(self._submits, taken)(body["input_ids"])


def taken(prefix: list[int]) -> httpx.Response:
    return httpx.Response(200, content=msgspec.json.encode(operation(prefix)))


def resident(prefix: list[int]) -> httpx.Response:
    done = operation(prefix, state=State.RESTORED, reason=Reason.ALREADY_RESIDENT)
    return httpx.Response(200, content=msgspec.json.encode(done))


def refused(retry_after_s: float | None) -> Callable[[list[int]], httpx.Response]:
    error = Error(code=Code.HOST_BUDGET, message="full", retry_after_s=retry_after_s)
    return lambda _: httpx.Response(429, content=msgspec.json.encode(ErrorReply(error=error)))


def run(endpoint: Endpoint, submits: int) -> Restores:
    """Restore two prefixes in turn until there were so many submits."""
    with (
        Toolgap("http://127.0.0.1:1", transport=httpx.MockTransport(endpoint)) as toolgap,
        Restorer(toolgap, [[1], [2]]) as restorer,
    ):
        end_s = time.monotonic() + 30
        while len(endpoint.submitted) < submits and restorer.running and time.monotonic() < end_s:
            time.sleep(0.001)
    return restorer.restores


def test_prefixes_take_turns_and_a_refused_or_resident_one_is_counted() -> None:
    endpoint = Endpoint(taken, resident, refused(0.001), taken, taken)
    found = run(endpoint, 5)
    assert endpoint.submitted[:5] == [[1], [2], [1], [1], [2]]
    assert (found.resident, found.refused) == (1, {"host_budget": 1})
    taken_count = len(endpoint.submitted) - 2
    assert found.states == {"restored": taken_count}
    assert (found.read_tokens, found.elapsed_ms) == (16 * taken_count, [250.0] * taken_count)
    assert found.restoring_s > 0


def test_a_refusal_that_waiting_does_not_help_is_raised() -> None:
    with pytest.raises(ToolgapError, match="full"):
        run(Endpoint(refused(None)), 2)
