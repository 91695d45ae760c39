from typing import Any

import pytest
from bench_trials import WHOLE, operation, trial, trials

from toolgap.bench.arms import Arm
from toolgap.bench.validity import LOADED_BACK, PREFETCHED, RULES, disagreements, judge
from toolgap.protocol import Reason, State


@pytest.mark.parametrize("arm", list(Arm))
def test_a_trial_that_found_what_its_arm_says_is_valid(arm: Arm) -> None:
    assert judge(trial(arm)) == []


def counted(arm: str, **changed: float) -> dict[str, float]:
    names = {"prefetched": PREFETCHED, "loaded": LOADED_BACK}
    return trial(arm).counters | {names[name]: value for name, value in changed.items()}


@pytest.mark.parametrize(
    ("rule", "arm", "fields"),
    [
        ("output", "A", {"output_ids": [1, 3]}),
        ("tiers", "A", {"storage_tokens": 16}),
        ("tiers", "B", {"storage_tokens": WHOLE - 16}),
        ("tiers", "B", {"device_tokens": 16, "storage_tokens": WHOLE - 16}),
        ("tiers", "C", {"host_tokens": 0, "storage_tokens": WHOLE}),
        ("tiers", "C", {"host_tokens": 0, "device_tokens": WHOLE}),
        ("tiers", "L2", {"device_tokens": 16}),
        ("tiers", "L1", {"device_tokens": WHOLE - 16, "host_tokens": 16}),
        ("reads", "A", {"counters": counted("A", prefetched=16.0)}),
        ("reads", "B", {"counters": counted("B", prefetched=2.0 * WHOLE)}),
        ("tiers", "D", {"host_tokens": WHOLE, "device_tokens": 0}),
        ("reads", "D", {"counters": counted("D", prefetched=2.0 * WHOLE)}),
        ("restored", "D", {"operation": None}),
        ("unmoved", "D", {"counters": counted("D", loaded=2.0 * WHOLE)}),
        ("reads", "C", {"counters": counted("C", prefetched=2.0 * WHOLE)}),
        ("reads", "L2", {"counters": counted("L2", prefetched=16.0)}),
        ("reads", "W", {"counters": {}}),
        ("evictions", "B", {"sentinel_resident_tokens": 496}),
        ("restored", "C", {"operation": None}),
        ("restored", "C", {"operation": operation(state=State.PARTIAL, reason=Reason.HOST_CAPACITY)}),
        ("restored", "C", {"operation": operation(resident_tokens=16)}),
        ("restored", "C", {"operation": operation(read_tokens=WHOLE - 16)}),
        ("unmoved", "C", {"counters": counted("C", loaded=2.0 * WHOLE)}),
        ("page_cache", "B", {"page_cache_share": 0.5}),
        ("page_cache", "B", {"page_cache": "cold", "page_cache_share": 0.5}),
        ("page_cache", "B", {"page_cache": "cold", "page_cache_share": None}),
    ],
)
def test_each_rule_is_broken_by_what_it_forbids(rule: str, arm: str, fields: dict[str, Any]) -> None:
    broken = judge(trial(arm, **fields))
    assert [reason.partition(":")[0] for reason in broken] == [rule]
    assert rule in RULES


def test_a_warm_up_may_read_any_number_of_times() -> None:
    assert judge(trial("W", counters=counted("W", prefetched=2.0 * WHOLE))) == []


def test_prompts_whose_reference_changes_are_told() -> None:
    made = trials()
    assert disagreements(made) == []
    made[3].reference_ids = [9]
    assert disagreements(made) == [f"{made[3].trial_id} has another reference than {made[0].trial_id}"]
