from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from bench_trials import manifest

from toolgap.bench.errors import BenchError
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.recipes.many_agents import (
    STOCK,
    TOOLGAP,
    Agents,
    Continuation,
    Crowd,
    ManyAgents,
    judge,
    note,
    outcome,
    play,
    sessions,
    submit,
)
from toolgap.bench.validity import COUNTERS, PREFETCHED
from toolgap.bench.workload import Session, Turn, prompt_tokens
from toolgap.client import Toolgap, ToolgapError
from toolgap.engineclient import Generation
from toolgap.protocol import Code, Error, ErrorReply, OperationStatus, Reason, State

RECIPE = ManyAgents()
PLAN = Plan(
    recipe="many-agents",
    seed=1,
    rounds=2,
    prompt_tokens=(2048,),
    gaps_ms=(0.0,),
    arms=(STOCK, TOOLGAP),
    page_tokens=16,
    page_cache="warm",
    options=RECIPE.defaults["options"],
)
MANIFEST = manifest(plan=PLAN)


def continuation(arm: str, agent: int, turn: int, **fields: Any) -> Continuation:
    values: dict[str, Any] = {
        "agent": agent,
        "turn": turn,
        "prompt_tokens": 1010,
        "prefix_tokens": 1000,
        "gap_s": 0.5,
        "late_ms": 0.1,
        "ttft_ms": 400.0 if arm == STOCK else 100.0,
        "device_tokens": 0,
        "host_tokens": 0 if arm == STOCK else 1000,
        "storage_tokens": 750 if arm == STOCK else 0,
        "output_tokens": 4,
        "output_sha256": f"{agent}/{turn}",
    }
    if arm == TOOLGAP:
        values |= {"state": "restored", "reason": "complete", "read_tokens": 1000}
    return Continuation(**values | fields)


def crowd(arm: str = TOOLGAP, round_number: int = 0, **fields: Any) -> Crowd:
    cell = Cell(prompt_tokens=2048, arm=arm, gap_ms=0.0)
    values: dict[str, Any] = {
        "trial_id": cell.trial_id(round_number),
        "round": round_number,
        "cell": cell,
        "began_ts": 1.0,
        "page_cache": "warm",
        "trace_sha256": None,
        "l1_tokens": 2560,
        "l2_tokens": 5120,
        "together_tokens": 6000,
        "planned_turns": [2, 1],
        "cut_gaps": 0,
        "first_ttft_ms": [900.0, 950.0],
        "continuations": [continuation(arm, *place) for place in ((0, 0), (0, 1), (1, 0))],
        "wall_s": 9.0,
        "counters": dict.fromkeys(COUNTERS, 0.0) | {PREFETCHED: 2250.0 if arm == STOCK else 4500.0},
    }
    trial = Crowd(**values | fields)
    trial.invalid = judge(trial)
    return trial


def with_last(trial: Crowd, **fields: Any) -> Crowd:
    for name, value in fields.items():
        setattr(trial.continuations[-1], name, value)
    trial.invalid = judge(trial)
    return trial


@pytest.mark.parametrize("arm", [STOCK, TOOLGAP])
def test_a_trial_that_keeps_every_rule(arm: str) -> None:
    assert crowd(arm).invalid == []


@pytest.mark.parametrize(
    ("trial", "rule"),
    [
        (crowd(planned_turns=[2, 2]), "finished: 3 of 4 turns"),
        (crowd(planned_turns=[1, 2]), "finished: 3 of 3 turns"),
        (crowd(planned_turns=[], first_ttft_ms=[], continuations=[]), "finished: 0 of 0"),
        (crowd(first_ttft_ms=[900.0]), "finished: 3 of 3 turns, 1 of 2 first"),
        (
            with_last(crowd(), device_tokens=11),
            "tokens: 1 continuations found more than their prompt, such as 1011",
        ),
        (with_last(crowd(STOCK), state="miss"), "alone: 1 prefixes"),
        (with_last(crowd(STOCK), refused="host_budget"), "alone: 1 prefixes"),
    ],
)
def test_each_rule(trial: Crowd, rule: str) -> None:
    assert len(trial.invalid) == 1
    assert trial.invalid[0].startswith(rule)


def test_a_trial_survives_its_file() -> None:
    assert msgspec.json.decode(msgspec.json.encode(crowd()), type=Crowd) == crowd()


def test_every_arm_of_every_round_is_planned() -> None:
    found = RECIPE.planned(PLAN)
    assert found == [
        "r0-2048-stock-0ms",
        "r0-2048-toolgap-0ms",
        "r1-2048-stock-0ms",
        "r1-2048-toolgap-0ms",
    ]
    assert crowd(TOOLGAP, 1).trial_id == found[3]


def test_nothing_is_started_for_a_run_that_is_done() -> None:
    stage: Any = SimpleNamespace()
    assert list(RECIPE.steps(PLAN, stage, None, set(RECIPE.planned(PLAN)), print)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"page_cache": "cold"},
        {"prompt_tokens": (2048, 4096)},
        {"arms": ("A",)},
        {"options": {"trace": "/no/such/file"}},
        {"options": {"gap": "both"}},
    ],
)
def test_a_plan_that_cannot_be_played(changes: dict[str, Any]) -> None:
    stage: Any = SimpleNamespace()
    with pytest.raises(BenchError):
        list(RECIPE.steps(msgspec.structs.replace(PLAN, **changes), stage, None, set(), print))


def test_the_sessions_of_a_round_are_its_own_and_keep_the_limits() -> None:
    agents = Agents.of(PLAN)
    found = sessions(PLAN, 0, None)
    assert (found, len(found)) == (sessions(PLAN, 0, None), agents.agents)
    assert found != sessions(PLAN, 1, None)
    for session in found:
        assert max(prompt_tokens(session)) <= 2048
        assert all(agents.least_gap_s <= turn.gap_s <= agents.most_gap_s for turn in session.turns)
        assert all(turn.output_tokens <= agents.most_output_tokens for turn in session.turns)


def test_by_default_the_agents_do_not_fit_in_l2_and_a_prefix_fits_in_its_half() -> None:
    l2_tokens = PLAN.options["l1_tokens"] * PLAN.options["l2_ratio"]
    for number in range(10):
        assert sum(prompt_tokens(session)[-1] for session in sessions(PLAN, number, None)) > l2_tokens
    assert l2_tokens / 2 >= 2048


def test_recorded_sessions_are_drawn_and_cut() -> None:
    recorded = [Session(50_000 + n, (Turn(1.0, 2000, 5000),) * 20) for n in range(30)]
    found = sessions(PLAN, 0, recorded)
    assert {len(session.turns) for session in found} == {6}
    assert {turn.output_tokens for session in found for turn in session.turns} == {32}
    with pytest.raises(BenchError, match="3 sessions"):
        sessions(PLAN, 0, recorded[:3])


def rows(text: str, first: str) -> list[list[str]]:
    return [
        cells[1:]
        for line in text.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] == first
    ]


def test_the_report_compares_the_arms() -> None:
    text = RECIPE.report(MANIFEST, [crowd(STOCK), crowd(), crowd(STOCK, 1)])
    assert rows(text, "stock")[0] == ["2", "6", "400", "400", "400", "925"]
    assert rows(text, "toolgap")[0] == ["1", "3", "100", "100", "100", "925"]
    assert rows(text, "toolgap / stock")[0][2:5] == ["0.250"] * 3
    assert (rows(text, "0"), rows(text, "1")) == ([["0.250"]], [])
    assert rows(text, "median [least, most]") == [["0.250 [0.250, 0.250]"]]
    assert "Toolgap loses in none" in text
    assert "In no trial do they fit in L2." in text


def test_the_report_says_where_toolgap_loses() -> None:
    slow = with_last(crowd(first_ttft_ms=[1850.0, 1850.0]), ttft_ms=800.0)
    text = RECIPE.report(MANIFEST, [crowd(STOCK), slow])
    assert "- p90 is 2.000 times stock's" in text
    assert "- p99 is 2.000 times stock's" in text
    assert "first prompts, which nothing is restored for, is 2.000" in text
    assert "p50 is longer" not in text
    slow = crowd(
        TOOLGAP, 1, continuations=[continuation(TOOLGAP, *p, ttft_ms=500.0) for p in ((0, 0), (0, 1), (1, 0))]
    )
    assert "p50 is longer than stock's in round 1 (1.250)" in RECIPE.report(MANIFEST, [crowd(STOCK, 1), slow])


def test_the_report_says_where_prefixes_were_found_and_what_was_read() -> None:
    text = RECIPE.report(MANIFEST, [crowd(STOCK), crowd()])
    assert rows(text, "stock")[1] == ["3,000", "0.0 %", "0.0 %", "75.0 %", "25.0 %", "2,250", "1.000"]
    assert rows(text, "toolgap")[1] == ["3,000", "0.0 %", "100.0 %", "0.0 %", "0.0 %", "4,500", "1.500"]


def test_the_report_counts_outcomes_refusals_and_what_came_too_early() -> None:
    trial = crowd()
    first, second, third = trial.continuations
    first.host_tokens, first.joined_requests = 600, 1
    second.reason, second.read_tokens, second.resident_tokens, second.host_tokens = (
        "already_resident",
        0,
        1000,
        0,
    )
    third.state, third.reason, third.read_tokens, third.refused = None, None, 0, "host_budget"
    text = RECIPE.report(MANIFEST, [trial])
    assert rows(text, "`restored: complete`") == [["1"]]
    assert rows(text, "`restored: already_resident`") == [["1"]]
    assert "Refused, by code: 1 host_budget. 1 requests joined" in text
    assert "read 1,000 tokens, of which 400 were not found" in text
    assert "1 operations found their whole prefix resident" in text
    assert "in 1 of these the prefix had left" in text
    assert "No round has two valid trials." in text


def test_the_report_compares_outputs() -> None:
    trials = [crowd(STOCK), crowd(), crowd(STOCK, 1), with_last(crowd(TOOLGAP, 1), output_sha256="x")]
    text = RECIPE.report(MANIFEST, trials)
    assert "5 of 6 answers" in text
    assert "`r1-2048-stock-0ms` and `r1-2048-toolgap-0ms`, round 1: agent 1 turn 0" in text
    assert "3 of 3 answers" in RECIPE.report(MANIFEST, trials[:2])


def test_the_report_says_when_everything_fits() -> None:
    text = RECIPE.report(MANIFEST, [crowd(), crowd(STOCK, together_tokens=5120, trace_sha256="ab12")])
    assert "In 1 of 2 trials they fit in L2" in text
    assert "the trace with SHA-256 ab12" in text


def test_an_invalid_trial_is_in_no_figure() -> None:
    wrong = with_last(crowd(TOOLGAP, 1), device_tokens=99, ttft_ms=9000.0)
    found = RECIPE.figures(MANIFEST, [crowd(), wrong])
    assert [(f.arm, f.prompt_tokens, f.gap_ms, f.ttft_ms_max, f.trials, f.invalid) for f in found] == [
        (STOCK, 2048, 0.0, None, 0, 0),
        (TOOLGAP, 2048, 0.0, 100.0, 1, 1),
    ]
    assert "9,000" not in RECIPE.report(MANIFEST, [crowd(), wrong])
    assert "## Validity" in RECIPE.report(MANIFEST, [wrong])
    assert RECIPE.charts(MANIFEST, [wrong]) == {}


def test_the_chart_has_both_arms() -> None:
    lines = RECIPE.charts(MANIFEST, [crowd(STOCK), crowd()])["many-agents-ttft"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["stock (3)", "toolgap (3)"]
    assert len({line.get_linestyle() for line in lines}) == 2


def operation(**fields: Any) -> OperationStatus:
    values: dict[str, Any] = {
        "operation_id": "op",
        "state": State.RESTORED,
        "reason": Reason.COMPLETE,
        "requested_tokens": 32,
        "aligned_tokens": 32,
        "resident_tokens": 16,
        "read_tokens": 16,
        "ttl_s": 60.0,
        "elapsed_s": 0.0,
        "namespace": "n",
    }
    return OperationStatus(**values | fields)


def endpoint(status: int, reply: Any) -> Toolgap:
    content = msgspec.json.encode(reply)
    return Toolgap(
        "http://127.0.0.1:1", transport=httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    )


def refusal(code: Code) -> ErrorReply:
    return ErrorReply(error=Error(code=code, message="no"))


def settled(value: str | Code) -> "Future[str | Code]":
    future: Future[str | Code] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("status", "code"),
    [(429, Code.HOST_BUDGET), (503, Code.PAUSED), (409, Code.ANCHOR_NOT_BACKED_UP)],
)
def test_a_refusal_is_a_code_and_no_error(status: int, code: Code) -> None:
    with endpoint(status, refusal(code)) as toolgap:
        assert submit(toolgap, [1], "s", 1.0) is code
        assert outcome(toolgap, settled(code)) is code


def test_another_error_is_raised() -> None:
    with endpoint(501, refusal(Code.NOT_SUPPORTED)) as toolgap, pytest.raises(ToolgapError):
        submit(toolgap, [1], "s", 1.0)


def test_an_outcome_is_written_down_with_its_continuation() -> None:
    one = continuation(STOCK, 0, 0)
    with endpoint(200, operation(joined_requests=1)) as toolgap:
        note(one, outcome(toolgap, settled("op")))
    assert (one.state, one.reason, one.resident_tokens, one.read_tokens, one.joined_requests) == (
        "restored",
        "complete",
        16,
        16,
        1,
    )
    with endpoint(404, refusal(Code.UNKNOWN_OPERATION)) as toolgap:
        note(one, outcome(toolgap, settled("op")))
    assert one.refused == "unknown_operation"


class Server:
    """Stands in for a stage: remembers prompts and submits; generates the prompt's length, repeated."""

    plan = PLAN
    l1_tokens = 2560
    storage: Path | None = None

    def __init__(self, fail_at: int = 10**9) -> None:
        self.engine = self.toolgap = self
        self.prompts: list[tuple[str, list[int]]] = []
        self.submits: list[tuple[str, list[int], float]] = []
        self.settled = 0
        self._fail_at = fail_at

    def generate(self, ids: Sequence[int], *, max_new_tokens: int, cache_salt: str) -> Generation:
        self.prompts.append((cache_salt, list(ids)))
        if len(self.prompts) >= self._fail_at:
            raise RuntimeError("the server is gone")
        return Generation(0.1, 0.2, len(ids), [len(ids)] * max_new_tokens, "", 0, 0, 0)

    def submit(self, *, input_ids: Sequence[int], cache_salt: str, ttl_s: float) -> OperationStatus:
        self.submits.append((cache_salt, list(input_ids), ttl_s))
        return operation(state=State.QUERYING)

    def wait(self, operation_id: str, timeout_s: float) -> OperationStatus:
        return operation()

    def overview(self) -> Any:
        return SimpleNamespace(engine=SimpleNamespace(host_total_tokens=5120))

    def counters(self, names: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(names, 0.0)

    def settled_counters(self, names: Sequence[str], name: str, least: float) -> dict[str, float]:
        return self.counters(names)

    def settle(self) -> None:
        self.settled += 1


TINY = [Session(40, (Turn(0.001, 5, 3), Turn(0.002, 6, 2))), Session(20, (Turn(0.001, 1, 1),))]


def play_on(server: Any, arm: str) -> Crowd:
    return play(server, Cell(prompt_tokens=2048, arm=arm, gap_ms=0.0), 0, TINY, "ab12")


def test_continuations_extend_what_came_before_and_prefixes_are_submitted() -> None:
    server = Server()
    trial = play_on(server, TOOLGAP)
    assert trial.invalid == []
    assert (server.settled, trial.trace_sha256, trial.planned_turns) == (1, "ab12", [2, 1])
    salts = {salt for salt, _ in server.prompts}
    assert len(salts) == 2
    first, second, third = sorted((ids for _, ids in server.prompts), key=len)[2:]
    assert (len(first), len(second), len(third)) == (40, 48, 56)
    assert second[:43] == first + [40] * 3
    assert third[:50] == second + [48] * 2
    long = sorted((one for one in server.submits if len(one[1]) > 16), key=lambda one: one[2])
    assert [(ids, ttl_s) for _, ids, ttl_s in long] == [(second[:32], 30.001), (third[:48], 30.002)]
    assert {one[0] for one in server.submits} == salts
    assert [(one.agent, one.turn, one.state) for one in trial.continuations] == [
        (0, 0, "restored"),
        (0, 1, "restored"),
        (1, 0, "restored"),
    ]


def test_stock_plays_the_same_ids_under_other_salts_and_submits_nothing() -> None:
    stock, toolgap = Server(), Server()
    assert play_on(stock, STOCK).invalid == []
    play_on(toolgap, TOOLGAP)
    assert stock.submits == []
    assert sorted(ids for _, ids in stock.prompts) == sorted(ids for _, ids in toolgap.prompts)
    assert not {salt for salt, _ in stock.prompts} & {salt for salt, _ in toolgap.prompts}


def test_what_fails_in_an_agent_fails_the_trial_at_once() -> None:
    waiting = [Session(40, (Turn(3600.0, 5, 3),)), Session(20, (Turn(0.001, 1, 1),))]
    server: Any = Server(fail_at=3)
    with pytest.raises(RuntimeError, match="the server is gone"):
        play(server, Cell(prompt_tokens=2048, arm=STOCK, gap_ms=0.0), 0, waiting, None)
