"""The recipe of continuations through a gateway: when a trial counts, what its report says, how an answer is read."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from bench_trials import PLAN, manifest, operation

from toolgap.bench.chat import Call, read
from toolgap.bench.gateway_turns import RULES, WITH, WITHOUT, Turn, expected_told, judge
from toolgap.bench.plan import Cell
from toolgap.bench.recipes import RECIPES
from toolgap.bench.validity import PREFETCHED
from toolgap.engineclient import EngineError
from toolgap.protocol import OperationStatus, Reason, State

WHOLE, TURN = 2032, 2080


def restore(**fields: Any) -> OperationStatus:
    values = {"read_tokens": TURN, "inserted_tokens": TURN, "used_tokens": WHOLE}
    return operation(**values | fields)


def turn(arm: str, gap_ms: float, round_number: int = 0, **fields: Any) -> Turn:
    cell = Cell(prompt_tokens=2048, arm=arm, gap_ms=gap_ms)
    ahead = arm == WITH and gap_ms > 0
    operations = fields.get("operations", [restore()] if ahead else [])
    values: dict[str, Any] = {
        "trial_id": cell.trial_id(round_number),
        "round": round_number,
        "cell": cell,
        "prefix_tokens": WHOLE,
        "turn_tokens": TURN,
        "prompt_tokens": 2072,
        "began_ts": 1.0,
        "page_cache": "warm",
        "page_cache_share": 1.0,
        "gap_ms": gap_ms,
        "late_ms": 0.0,
        "ttft_ms": (100.0 if ahead else 300.0) + round_number,
        "total_ms": 500.0,
        "arguments": "{}",
        "reference_arguments": "{}",
        "output_ids": [1, 2],
        "reference_ids": [1, 2],
        "device_tokens": 0,
        "host_tokens": WHOLE if ahead else 0,
        "storage_tokens": 0 if ahead else WHOLE,
        "counters": {PREFETCHED: float(TURN if ahead else WHOLE)},
        "operations": operations,
        "told": expected_told(operations),
        "hint_ms": 2.0 if arm == WITH else None,
    }
    made = Turn(**values | fields)
    made.invalid = judge(made)
    return made


JOINED = restore(joined_requests=1)
WITHDRAWN = restore(state=State.CANCELLED, reason=Reason.REQUESTED, read_tokens=16, inserted_tokens=16)


@pytest.mark.parametrize(
    ("arm", "gap_ms", "fields"),
    [
        (WITHOUT, 0.0, {}),
        (WITHOUT, 1000.0, {}),
        (WITH, 1000.0, {}),
        (
            WITH,
            1000.0,
            {"operations": [restore(state=State.PARTIAL, read_tokens=WHOLE, inserted_tokens=WHOLE)]},
        ),
        (WITH, 1000.0, {"operations": [JOINED]}),
        # Hint and continuation together: the gateway submits in time, too late, or takes the submit back.
        (WITH, 0.0, {}),
        (WITH, 0.0, {"operations": [JOINED], "host_tokens": WHOLE, "storage_tokens": 0}),
        (WITH, 0.0, {"operations": [WITHDRAWN], "told": expected_told([])}),
    ],
)
def test_a_trial_in_which_everything_is_where_its_arm_says_counts(
    arm: str, gap_ms: float, fields: dict[str, Any]
) -> None:
    assert judge(turn(arm, gap_ms, **fields)) == []


@pytest.mark.parametrize(
    ("rule", "arm", "gap_ms", "fields"),
    [
        ("output", WITH, 1000.0, {"output_ids": [1, 3]}),
        ("output", WITHOUT, 0.0, {"output_ids": [], "reference_ids": []}),
        ("output", WITHOUT, 0.0, {"arguments": '{"path": "x"}'}),
        ("tiers", WITHOUT, 0.0, {"storage_tokens": 0, "host_tokens": WHOLE}),
        ("tiers", WITHOUT, 0.0, {"storage_tokens": WHOLE - 16}),
        ("tiers", WITH, 0.0, {"storage_tokens": WHOLE - 16}),
        ("tiers", WITH, 1000.0, {"storage_tokens": WHOLE, "host_tokens": 0}),
        ("tiers", WITH, 1000.0, {"device_tokens": 16}),
        ("reads", WITHOUT, 0.0, {"counters": {PREFETCHED: float(TURN + 16)}}),
        ("reads", WITH, 1000.0, {"counters": {PREFETCHED: float(2 * TURN)}}),
        ("reads", WITH, 0.0, {"counters": {}}),
        ("restored", WITH, 1000.0, {"operations": []}),
        ("restored", WITH, 1000.0, {"operations": [restore(used_tokens=WHOLE - 16)]}),
        ("restored", WITH, 1000.0, {"operations": [restore(state=State.CANCELLED)]}),
        ("restored", WITH, 1000.0, {"operations": [restore(), restore(inserted_tokens=0)]}),
        ("restored", WITHOUT, 1000.0, {"operations": [restore()]}),
        ("told", WITH, 1000.0, {"told": expected_told([])}),
        ("told", WITHOUT, 0.0, {"told": expected_told([restore()])}),
        ("page_cache", WITHOUT, 0.0, {"page_cache_share": 0.5}),
    ],
)
def test_each_rule_is_broken_by_what_it_forbids(
    rule: str, arm: str, gap_ms: float, fields: dict[str, Any]
) -> None:
    broken = judge(turn(arm, gap_ms, **fields))
    assert [reason.partition(":")[0] for reason in broken] == [rule]
    assert rule in RULES


def test_the_report_has_both_ways_at_every_gap_without_what_does_not_count() -> None:
    recipe = RECIPES["gateway"]
    plan = msgspec.structs.replace(
        PLAN, recipe="gateway", prompt_tokens=(2048,), arms=(WITHOUT, WITH), gaps_ms=(0.0, 1000.0)
    )
    played = [
        turn(cell.arm, cell.gap_ms, number) for number in range(plan.rounds) for cell in recipe.cells(plan)
    ]
    assert [one.trial_id for one in played] == recipe.planned(plan)
    played.append(turn(WITH, 1000.0, 2, output_ids=[3], ttft_ms=1.0))
    about = manifest(plan=plan)
    text = recipe.report(about, played)
    assert "| 0 ms | 300 [300, 301] (2) | 300 [300, 301] (2) | 1.000 |" in text
    assert "| 1000 ms | 300 [300, 301] (2) | 100 [100, 101] (2) | 2.990 |" in text
    assert "| 0 ms | 0 of 2 | 0 | 0.00 [0.00, 0.00] (2) |" in text
    assert "| 1000 ms | 2 of 2 | 0 | 2,080 [2,080, 2,080] (2) | 2,032 [2,032, 2,032] (2) |" in text
    assert [(one.arm, one.gap_ms, one.ttft_ms_p50, one.invalid) for one in recipe.figures(about, played)] == [
        ("without restores", 0.0, 300.5, 0),
        ("without restores", 1000.0, 300.5, 0),
        ("with restores", 0.0, 300.5, 0),
        ("with restores", 1000.0, 100.5, 1),
    ]


def chunk(delta: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


ROLE = chunk({"role": "assistant", "content": ""})
USAGE = {"choices": [], "usage": {"prompt_tokens": 40}}
EXTENSION = {
    "choices": [],
    "sglext": {"cached_tokens_details": {"device": 1, "host": 2, "storage": 3}, "output_ids": [[5, 6]]},
}


def lines(*events: dict[str, Any]) -> Iterator[str]:
    for event in events:
        yield f"data: {json.dumps(event)}"
        yield ""
    yield "data: [DONE]"


def test_an_answer_is_read_as_it_is_streamed() -> None:
    first = {"index": 0, "id": "call_1", "function": {"name": "count", "arguments": '{"a"'}}
    more = {"index": 0, "id": None, "function": {"name": None, "arguments": ": 1}"}}
    streamed = [chunk({"content": None, "tool_calls": [part]}) for part in (first, more)]
    times = iter([10.5, 12.0])
    answer = read(lines(ROLE, *streamed, EXTENSION, USAGE), 10.0, lambda: next(times))
    assert (answer.ttft_s, answer.total_s) == (0.5, 2.0)
    assert (answer.device_tokens, answer.host_tokens, answer.storage_tokens) == (1, 2, 3)
    assert (answer.prompt_tokens, answer.output_ids) == (40, [5, 6])
    assert answer.calls == (Call("call_1", "count", '{"a": 1}'),)
    function = {"name": "count", "arguments": '{"a": 1}'}
    assert answer.message() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([ROLE, {"error": {"message": "no room"}}], "no room"),
        ([USAGE, EXTENSION], "first token"),
        ([ROLE, USAGE], "tiers"),
        ([ROLE, EXTENSION], "tiers"),
    ],
)
def test_an_answer_that_is_none_is_told(events: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        read(lines(*events), 0.0, lambda: 1.0)
