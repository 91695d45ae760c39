import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.bench.workload import Session, Turn
from toolgap.gateway import policy_evidence
from toolgap.gateway.policy import Settings, When
from toolgap.gateway.simulate import DEFAULT, NOTHING, POLICIES, Compared, Hint, Machine, Names, play

MACHINE = Machine(
    agents=2,
    host_tokens=1500,
    read_tokens_per_s=1000,
    timeout_s=(100.0, 0.0),
    piece_tokens=100,
    prefill_tokens_per_s=1e9,
    output_tokens_per_s=1e9,
    lease_share=0.5,
)
EVIDENCE = Path(__file__).parents[2] / "evidence" / policy_evidence.FOLDER


def session(*gaps_s: float, tokens: int = 1000) -> Session:
    return Session(tokens, tuple(Turn(gap_s, 1, 1) for gap_s in gaps_s))


TWO = [session(1000.0), session(*[30.0] * 100)]
"""One that is quiet for long, and one that uses host memory meanwhile."""


def test_without_need_nobody_waits() -> None:
    played = play([session(10.0, 20.0)], MACHINE, POLICIES[NOTHING])
    assert (played.continuations, played.stalled, played.stall_s) == (2, 0, 0.0)


def test_what_was_evicted_is_waited_for() -> None:
    played = play(TWO, MACHINE, POLICIES[NOTHING])
    assert played.stalled >= 1
    assert played.requested_tokens >= 500
    assert played.stall_s == pytest.approx(played.requested_tokens / 1000, rel=0.01)


def test_a_hint_saves_the_wait_and_what_it_evicts_is_counted() -> None:
    nothing = play(TWO, MACHINE, POLICIES[NOTHING])
    known = play([TWO[0]] + [session(*[30.0] * 20)], MACHINE, Compared(Settings(When.ON_HINT), Hint(0.0)))
    assert known.stall_s < nothing.stall_s
    assert known.evicted_tokens <= known.restored_tokens


def test_a_request_waits_no_longer_than_the_engine_lets_it() -> None:
    slow = MACHINE._replace(read_tokens_per_s=1, timeout_s=(3.0, 0.0))
    played = play(TWO, slow, POLICIES[NOTHING])
    assert played.stalled >= 1
    assert played.stall_s <= 3.0 * played.stalled + 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_a_seed_decides_everything(name: str) -> None:
    assert play(TWO, MACHINE, POLICIES[name], seed=3) == play(TWO, MACHINE, POLICIES[name], seed=3)


SESSIONS = st.lists(
    st.builds(
        Session,
        st.integers(1, 2000),
        st.lists(
            st.builds(Turn, st.floats(0, 2000), st.integers(1, 300), st.integers(1, 300)),
            min_size=1,
            max_size=6,
        ).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


@given(SESSIONS, st.sampled_from(list(POLICIES)), st.integers(0, 3))
def test_every_continuation_is_served_and_the_counts_agree(
    sessions: list[Session], name: str, seed: int
) -> None:
    played = play(sessions, MACHINE, POLICIES[name], seed=seed)
    assert played.continuations == sum(len(session.turns) for session in sessions)
    assert 0 <= played.stalled <= played.continuations
    assert 0 <= played.wasted_tokens <= played.restored_tokens
    assert played.evicted_tokens >= 0
    assert math.isfinite(played.stall_s)


def test_made_up_names_tell_no_more_than_their_ratio() -> None:
    names = Names(2.0)
    assert names.of(0.0) == names.of(1.0)
    assert names.of(10.0) != names.of(100.0)


def test_the_default_is_what_is_called_so() -> None:
    assert POLICIES[DEFAULT] == Compared(Settings())


def test_the_evidence_is_whole_and_says_that_the_default_slows_nobody_down() -> None:
    runs = policy_evidence.read(EVIDENCE)
    assert (EVIDENCE / policy_evidence.REPORT).read_text() == policy_evidence.report(runs)
    by_case = {(run.gap, run.agents, run.seed, run.policy): run.played for run in runs}
    for (*case, policy), played in by_case.items():
        if policy.startswith(DEFAULT):
            assert played.stall_s <= by_case[(*case, NOTHING)].stall_s  # type: ignore[index]
