"""Sessions of agents: as recorded, as fitted and generated, and scaled."""

import csv
import math
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.bench.spread import percentile
from toolgap.bench.workload import (
    FITTED_CORRECTED,
    FITTED_RAW,
    PERCENTS,
    Fit,
    Session,
    Turn,
    fit,
    generate,
    load,
    prompt_tokens,
    scale,
)

pytestmark = pytest.mark.slow

TRACE = Path(__file__).parents[3] / "shared" / "data" / "agent_tool_turns.csv"
HEADER = "trace,turn,gap_raw_s,gap_corrected_s,prev_in,prev_out,in,prev_is_block_prefix"
FITS = {"raw": FITTED_RAW, "corrected": FITTED_CORRECTED}
STRONG = FITTED_RAW._replace(
    gap_likeness=0.5, append_likeness=0.5, output_likeness=0.1, gap_append_correlation=-0.8
)
"""Correlations that cannot be overlooked."""
Gap = Literal["raw", "corrected"]

fits = pytest.mark.parametrize("fitted", [pytest.param(fitted, id=name) for name, fitted in FITS.items()])
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"the trace is not in the repository: no {TRACE}")

turns_of_any_size = st.builds(Turn, st.floats(0, 1e5), st.integers(1, 100_000), st.integers(1, 10_000))
sessions_of_any_size = st.lists(
    st.builds(Session, st.integers(1, 100_000), st.lists(turns_of_any_size, max_size=8).map(tuple)),
    max_size=4,
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def write(path: Path, *rows: str) -> None:
    path.write_text("\n".join([HEADER, *rows, ""]))


def test_a_prompt_is_all_that_was_said_before_it() -> None:
    session = Session(100, (Turn(1.0, append_tokens=20, output_tokens=3), Turn(1.0, 5, 1)))
    assert prompt_tokens(session) == [100, 123, 129]
    assert prompt_tokens(Session(100, ())) == [100]


def test_turns_follow_each_other_in_one_session_whatever_the_order_of_rows(trace: Path) -> None:
    write(trace, "b,2,1.5,0.5,50,5,60,1", "a,10,3,2,160,10,200,1", "a,9,7.5,6.25,100,20,160,1")
    a = Session(100, (Turn(7.5, 40, 20), Turn(3.0, 30, 10)))
    b = Session(50, (Turn(1.5, 5, 5),))
    assert load(trace, "raw") == [a, b]
    assert prompt_tokens(a) == [100, 160, 200]
    assert [turn.gap_s for session in load(trace, "corrected") for turn in session.turns] == [6.25, 2.0, 0.5]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("a,3,1,1,160,20,180,0", id="not an extension"),
        pytest.param("a,3,,,160,20,180,1", id="no gap"),
        pytest.param("a,3,1,1,160,20,161,1", id="no room for an answer and a result"),
    ],
)
def test_a_session_ends_before_a_row_that_is_no_turn_and_another_starts_behind(trace: Path, row: str) -> None:
    last = int(row.split(",")[6])
    write(trace, "a,2,1,1,100,20,160,1", row, f"a,4,2,2,{last},10,{last + 30},1")
    assert load(trace, "raw") == [Session(100, (Turn(1.0, 40, 20),)), Session(last, (Turn(2.0, 20, 10),))]


@pytest.mark.parametrize(
    "following",
    [
        pytest.param("a,4,2,2,160,10,190,1", id="a request is missing"),
        pytest.param("a,3,2,2,161,10,190,1", id="another prompt"),
        pytest.param("b,3,2,2,160,10,190,1", id="another trace"),
    ],
)
def test_what_does_not_follow_starts_a_session(trace: Path, following: str) -> None:
    write(trace, "a,2,1,1,100,20,160,1", following)
    assert [len(session.turns) for session in load(trace, "raw")] == [1, 1]
    write(trace, "a,2,1,1,100,20,160,1", "a,3,2,2,160,10,190,1")
    assert [len(session.turns) for session in load(trace, "raw")] == [2]


def test_only_the_gap_that_is_asked_for_must_be_known(trace: Path) -> None:
    write(trace, "a,2,1,,100,20,160,1")
    assert load(trace, "raw") == [Session(100, (Turn(1.0, 40, 20),))]
    assert load(trace, "corrected") == []


def test_an_answer_that_the_prompt_dropped_does_not_make_it_longer(trace: Path) -> None:
    write(trace, "a,2,1,1,100,500,160,1", "a,3,1,1,160,0,180,1")
    (session,) = load(trace, "raw")
    assert session.turns == (Turn(1.0, 1, 59), Turn(1.0, 19, 1))
    assert prompt_tokens(session) == [100, 160, 180]


def test_two_tokens_are_the_least_that_a_prompt_grows_by(trace: Path) -> None:
    write(trace, "a,2,1,1,100,20,102,1")
    assert load(trace, "raw") == [Session(100, (Turn(1.0, 1, 1),))]


def test_a_gap_is_not_negative(trace: Path) -> None:
    write(trace, "a,2,-0.5,0,100,20,160,1")
    assert load(trace, "raw")[0].turns[0].gap_s == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: there is no column 'trace'"),
        (HEADER.replace("prev_out,", ""), "line 1: there is no column 'prev_out'"),
        (HEADER.replace("gap_raw_s", "gap_s"), "line 1: there is no column 'gap_raw_s'"),
        (f"{HEADER}\na,2,1,1,100,20,160,1\na,3,1", "line 3, column 'prev_in': the row ends before it"),
        (f"{HEADER}\na,2,1,1,100,20,160,1,9", "line 2: there are cells after the last column, 'prev_is_"),
        (f"{HEADER}\na,2,1,1,100,20,160.5,1", "line 2, column 'in': '160.5' is not a whole number"),
        (f"{HEADER}\na,2,1,1,-1,20,160,1", "line 2, column 'prev_in': '-1' is not a whole number"),
        (f"{HEADER}\na,2,1,1,100,,160,1", "line 2, column 'prev_out': '' is not a whole number"),
        (
            f"{HEADER}\na,2,soon,1,100,20,160,1",
            "line 2, column 'gap_raw_s': 'soon' is not a number of seconds",
        ),
        (f"{HEADER}\na,2,nan,1,100,20,160,1", "line 2, column 'gap_raw_s': 'nan' is not a number of seconds"),
        (f"{HEADER}\na,2,inf,1,100,20,160,1", "line 2, column 'gap_raw_s': 'inf' is not a number of seconds"),
        (f"{HEADER}\na,2,1,1,100,20,160,1\n{'a' * 200_000}", "line 3: field larger than field limit"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(trace: Path, text: str, complaint: str) -> None:
    trace.write_text(text)
    with pytest.raises(ValueError, match="^" + re.escape(f"{trace}, {complaint}")):
        load(trace, "raw")


def test_bytes_that_are_no_text_are_refused_with_the_place(trace: Path) -> None:
    trace.write_bytes(f"{HEADER}\na,2,1,1,1".encode() + b"\xff,20,160,1\n")
    with pytest.raises(ValueError, match="line 2, column 'prev_in': "):
        load(trace, "raw")


@given(st.lists(st.lists(st.sampled_from(["", "a", "0", "1", "7", "90", "2.5", "-1", '"', "é"]), max_size=9)))
def test_any_file_is_loaded_or_refused(
    tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    write(path, *map(",".join, cells))
    try:
        sessions = load(path, "raw")
    except ValueError as error:
        assert str(error).startswith(f"{path}, line ")  # noqa: PT017 - a file may also be sound
    else:
        for session in sessions:
            assert session.turns
            assert all(turn.gap_s >= 0 and min(turn[1:]) >= 1 for turn in session.turns)


def test_a_fit_is_made_of_the_values() -> None:
    sessions = [Session(1000, tuple(Turn(i / 2, i, 2 * i) for i in range(1, 1001))), Session(5, ())]
    fitted = fit(sessions)
    assert fitted.gap_s == tuple(max(1, math.ceil(percent / 100 * 1000)) / 2 for percent in PERCENTS)
    assert fitted.append_tokens == tuple(round(2 * gap_s) for gap_s in fitted.gap_s)
    assert fitted.output_tokens == tuple(round(4 * gap_s) for gap_s in fitted.gap_s)
    assert set(fitted.first_prompt_tokens) == {1000}
    assert fitted.gap_append_correlation == 1.0


def test_a_first_prompt_counts_once_for_each_of_its_turns() -> None:
    turn = Turn(1.0, 1, 1)
    fitted = fit([Session(10, (turn,)), Session(20, (turn,) * 3)])
    assert dict(zip(PERCENTS, fitted.first_prompt_tokens, strict=True))[25] == 10
    assert dict(zip(PERCENTS, fitted.first_prompt_tokens, strict=True))[50] == 20


def test_likeness_is_what_turns_of_a_session_have_in_common() -> None:
    same = fit([Session(1, (Turn(float(i), i, 51 - i),) * 4) for i in range(1, 51)])
    assert (same.gap_likeness, same.append_likeness, same.output_likeness) == (1.0, 1.0, 1.0)
    rng = random.Random(1)
    other = fit([Session(1, tuple(Turn(rng.random(), 7, 1) for _ in range(4))) for _ in range(2000)])
    assert other.gap_likeness == pytest.approx(0.0, abs=0.03)
    assert (other.append_likeness, other.gap_append_correlation) == (0.0, 0.0)
    assert fit([Session(1, (Turn(float(i), i, i),)) for i in range(1, 51)]).gap_likeness == 0.0
    assert fit([Session(1, (Turn(0.0, 1, 1), Turn(1.0, 1, 1)))] * 50).gap_likeness == 0.0


def test_opposite_ranks_correlate_negatively() -> None:
    assert (
        fit([Session(1, tuple(Turn(float(i), 100 - i, 1) for i in range(50)))]).gap_append_correlation == -1
    )


def test_equal_values_have_one_rank() -> None:
    gaps_s, appends = (0.0, 0.0, 0.0, 1.0), (1, 1, 1, 2)
    independent = tuple(Turn(gap_s, append, 1) for gap_s in gaps_s for append in appends)
    assert fit([Session(1, independent)]).gap_append_correlation == 0
    assert fit([Session(1, independent[::-1])]).gap_append_correlation == 0
    rising, falling = (
        fit([Session(1, tuple(map(Turn, gaps_s, appends, (1, 1, 1, 1))))]).gap_append_correlation
        for appends in ([1, 1, 2, 3], [3, 3, 2, 1])
    )
    assert rising == -falling > 0


@pytest.mark.parametrize("sessions", [[], [Session(100, ())]])
def test_nothing_is_fitted_to_no_turns(sessions: list[Session]) -> None:
    with pytest.raises(ValueError, match="no turns"):
        fit(sessions)


@given(st.integers(), st.integers(0, 4), st.integers(0, 6))
@fits
def test_the_same_seed_generates_the_same_and_more_of_it_only_adds(
    fitted: Fit, seed: int, sessions: int, turns: int
) -> None:
    generated = generate(fitted, sessions=sessions, turns=turns, seed=seed)
    assert [len(session.turns) for session in generated] == [turns] * sessions
    assert generated == generate(fitted, sessions=sessions, turns=turns, seed=seed)
    more = generate(fitted, sessions=sessions + 1, turns=turns + 1, seed=seed)
    assert [session._replace(turns=session.turns[:turns]) for session in more[:sessions]] == generated
    other = generate(fitted, sessions=sessions + 1, turns=turns + 1, seed=seed + 1)
    assert other != more


@given(st.integers())
@fits
def test_what_is_generated_lies_within_the_tables(fitted: Fit, seed: int) -> None:
    for session in generate(fitted, sessions=3, turns=5, seed=seed):
        assert fitted.first_prompt_tokens[0] <= session.first_prompt_tokens <= fitted.first_prompt_tokens[-1]
        for turn in session.turns:
            assert fitted.gap_s[0] <= turn.gap_s <= fitted.gap_s[-1]
            assert fitted.append_tokens[0] <= turn.append_tokens <= fitted.append_tokens[-1]
            assert fitted.output_tokens[0] <= turn.output_tokens <= fitted.output_tokens[-1]


@pytest.mark.parametrize("fitted", [FITTED_RAW, FITTED_CORRECTED, STRONG], ids=["raw", "corrected", "strong"])
def test_many_generated_sessions_have_the_distribution_of_the_fit(fitted: Fit) -> None:
    sessions = generate(fitted, sessions=5000, turns=4, seed=1)
    turns = [turn for session in sessions for turn in session.turns]
    checked: list[tuple[Sequence[float], list[float], float]] = [
        (fitted.gap_s, [turn.gap_s for turn in turns], 0.005),
        (fitted.append_tokens, [turn.append_tokens for turn in turns], 0.5),
        (fitted.output_tokens, [turn.output_tokens for turn in turns], 0.5),
        (fitted.first_prompt_tokens, [session.first_prompt_tokens for session in sessions], 0.5),
    ]
    for table, values, rounding in checked:
        ordered = sorted(values)
        # Beyond 99.9 % there are too few values to compare.
        for (below, low), (above, high) in pairwise(zip(PERCENTS[:-2], table[:-2], strict=True)):
            between = math.expm1((math.log1p(low) + math.log1p(high)) / 2)
            for percent, value in ((above, high), ((below + above) / 2, between)):
                slack = 0.1 + 4 * math.sqrt(percent / 100 * (1 - percent / 100))  # 2.1 % at the median
                assert percentile(ordered, max(0.0, percent - slack)) <= value + rounding
                assert percentile(ordered, min(100.0, percent + slack)) >= value - rounding
    again = fit(sessions)
    for field in ("gap_likeness", "append_likeness", "output_likeness", "gap_append_correlation"):
        assert getattr(again, field) == pytest.approx(getattr(fitted, field), abs=0.03), field


@given(
    sessions_of_any_size,
    st.floats(1e-4, 10),
    st.floats(0, 10),
    st.integers(0, 100_000),
    st.floats(0, 5),
)
def test_scaled_sessions_keep_the_limits_and_are_as_long_as_these_allow(
    sessions: list[Session], tokens: float, time: float, most_prompt_tokens: int, least_gap_s: float
) -> None:
    limits = {"tokens": tokens, "time": time, "least_gap_s": least_gap_s}
    everything = scale(sessions, most_prompt_tokens=10**9, **limits)
    assert len(everything) == sum(1 for session in sessions if session.turns)
    scaled = scale(sessions, most_prompt_tokens=most_prompt_tokens, **limits)
    kept = iter(scaled)
    for whole in everything:
        fitting = sum(1 for prompt in prompt_tokens(whole) if prompt <= most_prompt_tokens)
        if fitting > 1:
            assert next(kept) == whole._replace(turns=whole.turns[: fitting - 1])
    assert next(kept, None) is None
    for session in scaled:
        prompts = prompt_tokens(session)
        assert prompts[-1] <= most_prompt_tokens
        assert all(earlier + 2 <= later for earlier, later in pairwise(prompts))
        assert session.first_prompt_tokens >= 1
        assert all(turn.gap_s >= least_gap_s and min(turn[1:]) >= 1 for turn in session.turns)


def test_scaling_multiplies_tokens_and_gaps() -> None:
    sessions = [Session(1000, (Turn(8.0, 300, 100), Turn(0.5, 20, 4)))]
    scaled = scale(sessions, tokens=0.1, time=0.25, most_prompt_tokens=143, least_gap_s=0.5)
    assert scaled == [Session(100, (Turn(2.0, 30, 10), Turn(0.5, 2, 1)))]
    assert scale(sessions, tokens=0.1, time=0.25, most_prompt_tokens=142) == [
        Session(100, (Turn(2.0, 30, 10),))
    ]
    assert scale(sessions, tokens=0.1, time=0.25, most_prompt_tokens=139) == []


def test_scaling_by_one_changes_nothing() -> None:
    sessions = generate(FITTED_RAW, sessions=5, turns=5, seed=1)
    assert scale(sessions, tokens=1.0, time=1.0, most_prompt_tokens=10**9) == sessions


@needs_trace
@pytest.mark.parametrize("gap", FITS)
def test_the_constants_are_what_the_trace_gives(gap: Gap) -> None:
    assert fit(load(TRACE, gap)) == FITS[gap]


@needs_trace
@pytest.mark.parametrize("gap", FITS)
def test_prompts_of_the_trace_are_kept_to_the_token(gap: Gap) -> None:
    with TRACE.open(newline="") as file:
        expected = [
            int(row["in"])
            for row in csv.DictReader(file)
            if row["prev_is_block_prefix"] == "1" and row[f"gap_{gap}_s"]
        ]
    assert [prompt for session in load(TRACE, gap) for prompt in prompt_tokens(session)[1:]] == expected


@needs_trace
@pytest.mark.parametrize("gap", FITS)
def test_generated_turns_are_distributed_as_in_the_trace(gap: Gap) -> None:
    recorded = [turn for session in load(TRACE, gap) for turn in session.turns]
    generated = [turn for s in generate(FITS[gap], sessions=4000, turns=5, seed=1) for turn in s.turns]
    for field, name in enumerate(Turn._fields):
        ours, theirs = sorted(turn[field] for turn in generated), sorted(turn[field] for turn in recorded)
        apart = max(
            abs(bisect_right(ours, value) / len(ours) - bisect_right(theirs, value) / len(theirs))
            for value in ours
        )
        assert apart < 0.06, name
