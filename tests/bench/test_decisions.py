"""The recipe ``admission``: the server's decisions against what both ways took."""

from collections.abc import Sequence

import msgspec
import pytest
from bench_trials import PLAN, manifest, trial

from toolgap.bench.decisions import NO_MATTER, RIGHT, WRONG, judge
from toolgap.bench.recipes import RECIPES
from toolgap.bench.records import Asked, Trial
from toolgap.protocol import Estimate

RECIPE = RECIPES["admission"]


def asked(*, admitted: bool, code: str | None = None) -> Asked:
    expected = Estimate(
        missing_tokens=4080,
        restore_s=0.2,
        recompute_s=0.1,
        gap_s=0.001,
        queued_tokens=0,
        restore_tokens_per_s=20_400,
        prefill_tokens_per_s=40_800,
        worthwhile=admitted,
    )
    return Asked(admitted=admitted, code=code, estimate=expected)


def run(*recomputes_ms: float) -> list[Trial]:
    """Arm A of as many rounds."""
    return [trial("A", round_number=number, ttft_ms=ttft_ms) for number, ttft_ms in enumerate(recomputes_ms)]


def ahead(ttft_ms: float, *, admitted: bool, gap_ms: float = 0.0, round_number: int = 0) -> Trial:
    return trial(
        "C",
        gap_ms=gap_ms,
        round_number=round_number,
        ttft_ms=ttft_ms,
        asked=asked(admitted=admitted, code=None if admitted else "not_worthwhile"),
    )


@pytest.mark.parametrize(
    ("ttft_ms", "admitted", "verdict"),
    [
        (50.0, True, RIGHT),
        (200.0, True, WRONG),
        (200.0, False, RIGHT),
        (50.0, False, WRONG),
        (104.0, True, NO_MATTER),
        (96.0, False, NO_MATTER),
    ],
)
def test_a_decision_is_right_if_the_way_it_chose_was_the_faster_one(
    ttft_ms: float, admitted: bool, verdict: str
) -> None:
    assert judge(ahead(ttft_ms, admitted=admitted), run(100.0, 100.0)) == verdict


def test_two_ways_are_told_apart_by_no_less_than_a_recompute_varies() -> None:
    trials = run(100.0, 180.0)
    assert judge(ahead(135.0, admitted=True), trials) == NO_MATTER
    assert judge(ahead(145.0, admitted=True), trials) == WRONG


def test_without_a_recompute_of_the_same_prompt_nothing_is_judged() -> None:
    assert judge(ahead(50.0, admitted=True, round_number=1), run(100.0)) is None
    assert judge(trial("C", ttft_ms=50.0), run(100.0)) is None


def report(trials: Sequence[Trial]) -> str:
    plan = msgspec.structs.replace(PLAN, recipe="admission", arms=("A", "B", "C"))
    return RECIPE.report(manifest(plan=plan), trials)


def test_the_report_counts_decisions_and_what_wrong_ones_cost() -> None:
    trials = [
        *run(100.0, 100.0),
        ahead(50.0, admitted=True, gap_ms=1000.0),
        ahead(160.0, admitted=True, gap_ms=1000.0, round_number=1),
        ahead(230.0, admitted=False),
        ahead(101.0, admitted=False, round_number=1),
    ]
    text = report(trials)
    assert "| admitted | 1 | 0 | 1 |" in text
    assert "| declined | 1 | 1 | 0 |" in text
    assert "Wrong decisions cost 60.0 ms" in text
    assert "2 declined" in text
    assert "2 admitted" in text
    assert "1 right, 1 wrong" in text
