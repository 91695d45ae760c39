"""Many agents at once, as recorded or generated: occupancy alone decides which prefixes leave L1 and L2."""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from toolgap.bench import charts, tables
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import Manifest, sha256
from toolgap.bench.plan import OUTPUT_TOKENS, Cell, Plan, prefix_tokens, prompt_ids
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread, percentile
from toolgap.bench.stage import RESTORE_DEADLINE_S, VOCABULARY, Stage, fresh_salt
from toolgap.bench.validity import COUNTERS, PREFETCHED
from toolgap.bench.workload import (
    FITTED_CORRECTED,
    FITTED_RAW,
    Session,
    generate,
    load,
    prompt_tokens,
    scale,
)
from toolgap.client import Toolgap, ToolgapError
from toolgap.engineclient import Generation
from toolgap.protocol import MAX_TTL_S, Code, OperationStatus, Reason

STOCK, TOOLGAP = "stock", "toolgap"
ARMS = (STOCK, TOOLGAP)

FITS = {"raw": FITTED_RAW, "corrected": FITTED_CORRECTED}
TRACE_PROMPT_TOKENS = 100_000
"""The trace's median prompt, roughly; becomes half of the longest prompt that is played."""

TTL_BEYOND_GAP_S = 30.0
REFUSALS = (409, 429, 503)
"""Statuses of submits that are counted; any other fails the trial."""

DRAWN_PER_AGENT = 8
"""Sessions drawn for each that is played: those whose first prompt is too long are left out."""


class Agents(NamedTuple):
    """Who is played, from the plan's options."""

    agents: int
    turns: int
    gap: Literal["raw", "corrected"]
    trace: str | None
    tokens_scale: float
    time_scale: float
    least_gap_s: float
    most_gap_s: float
    most_prompt_tokens: int
    most_output_tokens: int
    lead_s: float | None
    """How long before the tool returns its prefix is submitted; None for when the tool call leaves."""

    @classmethod
    def of(cls, plan: Plan) -> "Agents":
        """With the defaults for what the plan leaves open.

        Raises:
            BenchError: an option has no such value.
        """
        options, longest = plan.options, plan.prompt_tokens[0]
        if (gap := options.get("gap", "corrected")) not in FITS:
            raise BenchError(f"the option gap is {' or '.join(FITS)}, not {gap!r}")
        return cls(
            agents=int(options.get("agents", 12)),
            turns=int(options.get("turns", 6)),
            gap=gap,
            trace=None if (trace := options.get("trace")) is None else str(trace),
            tokens_scale=float(options.get("tokens_scale", longest / 2 / TRACE_PROMPT_TOKENS)),
            time_scale=float(options.get("time_scale", 1.0)),
            least_gap_s=float(options.get("least_gap_s", 0.05)),
            most_gap_s=float(options.get("most_gap_s", 60.0)),
            most_prompt_tokens=longest,
            most_output_tokens=int(options.get("most_output_tokens", 32)),
            lead_s=None if (lead_s := options.get("lead_s")) is None else float(lead_s),
        )


def sessions(plan: Plan, round_number: int, recorded: Sequence[Session] | None) -> list[Session]:
    """A round's sessions, one for each agent; both arms play the same.

    Args:
        plan: Says how many and how long.
        round_number: Each has sessions of its own.
        recorded: What to draw from; None to generate them.

    Raises:
        BenchError: too few are left once those with too long a prompt are out.
    """
    agents = Agents.of(plan)
    if recorded is None:
        seed = plan.seed * 10_000 + round_number
        count = agents.agents * DRAWN_PER_AGENT
        drawn = generate(FITS[agents.gap], sessions=count, turns=agents.turns, seed=seed)
    else:
        drawn = [session._replace(turns=session.turns[: agents.turns]) for session in recorded]
        random.Random(f"many-agents/{plan.seed}/{round_number}").shuffle(drawn)  # noqa: S311 - to be repeatable
    scaled = scale(
        drawn,
        tokens=agents.tokens_scale,
        time=agents.time_scale,
        most_prompt_tokens=agents.most_prompt_tokens,
        least_gap_s=agents.least_gap_s,
    )[: agents.agents]
    if len(scaled) < agents.agents:
        raise BenchError(
            f"{len(scaled)} sessions have prompts of at most {agents.most_prompt_tokens:,} tokens, and "
            f"{agents.agents} agents are asked for: make tokens_scale smaller"
        )
    return [
        session._replace(
            turns=tuple(
                turn._replace(
                    gap_s=min(turn.gap_s, agents.most_gap_s),
                    output_tokens=min(turn.output_tokens, agents.most_output_tokens),
                )
                for turn in session.turns
            )
        )
        for session in scaled
    ]


class Continuation(msgspec.Struct, kw_only=True):
    """One continuation and, in the arm ``toolgap``, what came of its restore."""

    agent: int
    turn: int
    prompt_tokens: int
    prefix_tokens: int
    """Whole pages of what its agent had sent and received before: all that a cache can hold of it."""
    gap_s: float
    """As the session has it."""
    late_ms: float
    """What the gap came out longer."""
    ttft_ms: float
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    output_tokens: int
    output_sha256: str
    state: str | None = None
    """Of the operation at its end; None if there was none, or its end could not be learned."""
    reason: str | None = None
    resident_tokens: int = 0
    """When it was submitted."""
    read_tokens: int = 0
    joined_requests: int = 0
    used_tokens: int = 0
    """Of those that it read, by the time that its end was asked for: after the continuation."""
    refused: str | None = None
    """Code of a refused submit, or of a refused question for the operation's end."""

    @property
    def found_tokens(self) -> int:
        """Of its prompt, in any tier."""
        return self.device_tokens + self.host_tokens + self.storage_tokens


class Crowd(msgspec.Struct, kw_only=True):
    """One run of all agents from their first prompt to their last answer."""

    trial_id: str
    round: int
    cell: Cell
    began_ts: float
    page_cache: str
    """Of files that the trial itself writes, so never cold."""
    trace_sha256: str | None
    """Of the recorded sessions' file; None if they were generated."""
    l1_tokens: int
    l2_tokens: int
    together_tokens: int
    """All agents' last prompts: what would have to stay for nothing to be read or recomputed."""
    planned_turns: list[int]
    """Of each agent."""
    cut_gaps: int
    """Gaps as long as the longest that is played."""
    first_ttft_ms: list[float]
    """Of each agent's first prompt, which nothing can be found of."""
    continuations: list[Continuation]
    wall_s: float
    counters: dict[str, float]
    """Changes of the engine's own, from the first request to the last outcome."""
    invalid: list[str] = []


def judge(trial: Crowd) -> list[str]:
    """The rules that did not hold."""
    found = []
    expected = [(agent, turn) for agent, turns in enumerate(trial.planned_turns) for turn in range(turns)]
    played = [(one.agent, one.turn) for one in trial.continuations]
    if not expected or sorted(played) != expected or len(trial.first_ttft_ms) != len(trial.planned_turns):
        found.append(
            f"finished: {len(played)} of {len(expected)} turns, {len(trial.first_ttft_ms)} of "
            f"{len(trial.planned_turns)} first prompts"
        )
    if over := [one for one in trial.continuations if one.found_tokens > one.prompt_tokens]:
        found.append(
            f"tokens: {len(over)} continuations found more than their prompt, such as {over[0].found_tokens} of "
            f"{over[0].prompt_tokens} tokens"
        )
    submitted = sum(one.state is not None or one.refused is not None for one in trial.continuations)
    if trial.cell.arm == STOCK and submitted:
        found.append(f"alone: {submitted} prefixes were submitted")
    return found


RULES = (
    "every agent had the answer to its first prompt and finished all its turns; no continuation found more cached "
    "tokens than its prompt has; in the arm stock no prefix was submitted"
)


class ManyAgents(Recipe[Crowd]):
    """Agents with tool calls, each in a thread of its own, with restores at each tool call or without."""

    name = "many-agents"
    says = "agents with tool times and growth as in a real trace, more of them than L1 and L2 hold"
    trial_type = Crowd
    defaults: ClassVar[dict[str, Any]] = {
        "prompt_tokens": (2048,),
        "gaps_ms": (0.0,),
        "arms": ARMS,
        # Operations get half of L2, and the longest prefix must fit in that; twelve agents must not fit in L2.
        "options": {"agents": 12.0, "l1_tokens": 2560.0, "l2_ratio": 2.0},
    }

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        if not set(self.planned(plan)) - done:
            return
        if len(plan.prompt_tokens) > 1 or plan.page_cache == "cold" or set(plan.arms) - set(ARMS):
            raise BenchError(
                f"{self.name} takes one prompt size, the arms {' and '.join(ARMS)}, and no cold page cache, since "
                "its trials write the files that they read"
            )
        trace, recorded, digest = Agents.of(plan), None, None
        if trace.trace is not None:
            try:
                recorded, digest = load(Path(trace.trace), trace.gap), sha256(Path(trace.trace))
            except (OSError, ValueError) as error:
                raise BenchError(f"the trace cannot be read: {error}") from error
        say("warming up")
        warm_up(stage)
        for trial_id, cell, number in self.left(plan, done):
            played = sessions(plan, number, recorded)
            yield Step(trial_id, partial(play, stage, cell, number, played, digest))

    def ttft_ms(self, trial: Crowd) -> Sequence[float]:
        """See :class:`~toolgap.bench.recipe.Recipe`: those of its continuations."""
        return [one.ttft_ms for one in trial.continuations]

    def judge(self, trial: Crowd) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return judge(trial)

    def report(self, manifest: Manifest, trials: Sequence[Crowd]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        valid = [trial for trial in trials if not trial.invalid]
        parts = [self.setting(manifest.plan, trials)]
        if valid:
            parts += [
                "## Time to first token",
                _pooled(valid),
                _by_round(valid),
                _losses(valid),
                "## Where prefixes were found",
                _shares(valid),
                "## What became of the restores",
                _restores(valid),
                "## Outputs",
                _outputs(valid),
            ]
        parts += ["## Validity", f"A trial counts only if {RULES}."]
        return "\n\n".join(part for part in parts if part)

    def setting(self, plan: Plan, trials: Sequence[Crowd]) -> str:
        """What was played, for the report."""
        return _setting(plan, trials)

    def charts(self, manifest: Manifest, trials: Sequence[Crowd]) -> dict[str, Any]:
        """See :class:`~toolgap.bench.recipe.Recipe`: the whole distributions."""
        valid = [trial for trial in trials if not trial.invalid]
        series = {arm: values for arm in ARMS if (values := _ttft_ms(valid, arm))}
        if not series:
            return {}
        title = f"{manifest.model}, {tables.hardware(manifest)}: continuations of many agents"
        return {f"{self.name}-ttft": charts.distributions(title, "time to first token, ms", series)}


# ---- the report ----


def _continuations(trials: Sequence[Crowd], arm: str) -> list[Continuation]:
    return [one for trial in trials if trial.cell.arm == arm for one in trial.continuations]


def _ttft_ms(trials: Sequence[Crowd], arm: str) -> list[float]:
    return [one.ttft_ms for one in _continuations(trials, arm)]


QUANTILES: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": median,
    "p90": lambda values: percentile(values, 90),
    "p99": lambda values: percentile(values, 99),
}


def _ratios(trials: Sequence[Crowd]) -> dict[str, float]:
    """Toolgap over stock, by quantile; empty unless both have continuations."""
    stock, toolgap = _ttft_ms(trials, STOCK), _ttft_ms(trials, TOOLGAP)
    if not stock or not toolgap:
        return {}
    return {name: of(toolgap) / of(stock) for name, of in QUANTILES.items() if of(stock)}


def _rounds(trials: Sequence[Crowd]) -> list[tuple[int, Crowd, Crowd]]:
    """Rounds that have both arms: number, stock, toolgap."""
    by_place = {(trial.round, trial.cell.arm): trial for trial in trials}
    return [
        (number, by_place[number, STOCK], by_place[number, TOOLGAP])
        for number in sorted({trial.round for trial in trials})
        if (number, STOCK) in by_place and (number, TOOLGAP) in by_place
    ]


def _setting(plan: Plan, trials: Sequence[Crowd]) -> str:
    agents = Agents.of(plan)
    digests = sorted({trial.trace_sha256 for trial in trials if trial.trace_sha256})
    source = (
        f"the trace with SHA-256 {', '.join(digests)}" if digests else "the generator fitted to the trace"
    )
    gaps = sum(len(trial.continuations) for trial in trials)
    text = (
        f"{agents.agents} agents with up to {agents.turns} tool calls each, from {source} ({agents.gap} gaps); "
        f"token counts times {agents.tokens_scale:g}, gaps times {agents.time_scale:g} and between "
        f"{agents.least_gap_s:g} and {agents.most_gap_s:g} s ({sum(t.cut_gaps for t in trials)} of {gaps} at the "
        f"longest), answers of at most {agents.most_output_tokens} tokens. Both arms of a round play the same "
        f"sessions with the same token ids, and share no KV. *toolgap* submits the prefix {_when(agents.lead_s)}; "
        "*stock* submits nothing. Nothing else pushes KV out: the agents do it to each other."
    )
    together = Spread.of(float(trial.together_tokens) for trial in trials)
    if together is None:
        return text
    l1_tokens, l2_tokens = trials[0].l1_tokens, trials[0].l2_tokens
    fitting = sum(trial.together_tokens <= trial.l2_tokens for trial in trials)
    return (
        f"{text}\n\nThe agents' last prompts have {tables.spread(together)} tokens together; L1 holds {l1_tokens:,}, "
        f"L2 {l2_tokens:,}. "
        + (
            f"**In {fitting} of {len(trials)} trials they fit in L2, so that hardly anything is to be restored.**"
            if fitting
            else "In no trial do they fit in L2."
        )
    )


def _when(lead_s: float | None) -> str:
    if lead_s is None:
        return "when the tool call leaves"
    return f"{lead_s:g} s before the tool returns, as one can who knows how long the tool takes"


def _pooled(trials: Sequence[Crowd]) -> str:
    rows = []
    for arm in ARMS:
        own, values = [trial for trial in trials if trial.cell.arm == arm], _ttft_ms(trials, arm)
        first = [value for trial in own for value in trial.first_ttft_ms]
        quantiles = [tables.number(of(values)) if values else "-" for of in QUANTILES.values()]
        rows.append([arm, str(len(own)), str(len(values)), *quantiles, tables.p50(first)])
    ratios = _ratios(trials)
    rows.append(
        [
            "toolgap / stock",
            "",
            "",
            *(f"{ratios[name]:.3f}" if name in ratios else "-" for name in QUANTILES),
            "",
        ]
    )
    table = tables.table(["TTFT, ms", "trials", "continuations", *QUANTILES, "first prompts p50"], rows)
    return (
        "Over all continuations of the valid trials. p90 and p99 are nearest ranks: of fewer than 100 values p99 is "
        f"the largest.\n\n{table}"
    )


def _round_ratios(trials: Sequence[Crowd]) -> list[tuple[int, float]]:
    ratios = [(number, _ratios([stock, toolgap])) for number, stock, toolgap in _rounds(trials)]
    return [(number, found["p50"]) for number, found in ratios if "p50" in found]


def _by_round(trials: Sequence[Crowd]) -> str:
    ratios = _round_ratios(trials)
    spread = Spread.of(ratio for _, ratio in ratios)
    if spread is None:
        return "No round has two valid trials."
    rows = [[str(number), f"{ratio:.3f}"] for number, ratio in ratios]
    rows.append(["median [least, most]", f"{spread.p50:.3f} [{spread.low:.3f}, {spread.high:.3f}]"])
    return tables.table(["round", "TTFT p50, toolgap / stock"], rows)


def _losses(trials: Sequence[Crowd]) -> str:
    lost = [f"{name} is {ratio:.3f} times stock's" for name, ratio in _ratios(trials).items() if ratio > 1]
    if slower := [f"{number} ({ratio:.3f})" for number, ratio in _round_ratios(trials) if ratio > 1]:
        lost.append(f"p50 is longer than stock's in round {', '.join(slower)}")
    first = [[v for t in trials if t.cell.arm == arm for v in t.first_ttft_ms] for arm in ARMS]
    if all(first) and (ratio := median(first[1]) / median(first[0])) > 1:
        lost.append(f"p50 of first prompts, which nothing is restored for, is {ratio:.3f} times stock's")
    return tables.listed("Where toolgap loses", lost) or "Toolgap loses in none of these figures."


def _shares(trials: Sequence[Crowd]) -> str:
    rows = []
    for arm in ARMS:
        own = _continuations(trials, arm)
        prefix = sum(one.prefix_tokens for one in own)
        used = sum(one.found_tokens for one in own)
        counts = [
            sum(one.device_tokens for one in own),
            sum(one.host_tokens for one in own),
            sum(one.storage_tokens for one in own),
            sum(max(0, one.prefix_tokens - one.found_tokens) for one in own),
        ]
        read = sum(trial.counters.get(PREFETCHED, 0.0) for trial in trials if trial.cell.arm == arm)
        shares = [f"{100 * count / prefix:.1f} %" if prefix else "-" for count in counts]
        rows.append([arm, f"{prefix:,}", *shares, f"{read:,.0f}", f"{read / used:.3f}" if used else "-"])
    head = [
        "",
        "prefix tokens",
        "device",
        "host",
        "storage",
        "recomputed",
        "read from storage",
        "read per token used",
    ]
    return (
        "Shares of the continuations' prefixes by where they were found. *Read from storage* is SGLang's counter, "
        "whoever asked; *used* are tokens of a continuation's prompt that were found in any tier. What a restore "
        f"brought counts as host.\n\n{tables.table(head, rows)}"
    )


def _restores(trials: Sequence[Crowd]) -> str:
    own = _continuations(trials, TOOLGAP)
    if not own:
        return "No valid trial of the arm toolgap."
    states = Counter(f"{one.state}: {one.reason}" for one in own if one.state is not None)
    refused = Counter(one.refused for one in own if one.refused is not None)
    rows = [[f"`{name}`", str(count)] for name, count in sorted(states.items())]
    read = sum(one.read_tokens for one in own)
    unused = sum(
        one.read_tokens - min(one.read_tokens, max(0, one.found_tokens - one.resident_tokens)) for one in own
    )
    early = [one for one in own if one.reason == Reason.ALREADY_RESIDENT]
    gone = sum(one.device_tokens + one.host_tokens < one.prefix_tokens for one in early)
    return (
        f"{tables.table(['operations', ''], rows) if rows else 'No operation.'}\n\n"
        f"Refused, by code: {tables.counted(refused) or 'none'}. "
        f"{sum(one.joined_requests for one in own)} requests joined an operation's read. "
        f"Operations read {read:,} tokens, of which {unused:,} were not found by their "
        f"continuation. {len(early)} operations found their whole prefix resident, since the tool call had just "
        f"left, and read nothing; in {gone} of these the prefix had left L1 and L2, in part or whole, when the "
        "continuation came: those restores were submitted too early to be of use."
    )


def _outputs(trials: Sequence[Crowd]) -> str:
    """Equality of the answers of both arms; a difference makes its agent's later prompts differ too."""
    agree = total = 0
    different = []
    for number, stock, toolgap in _rounds(trials):
        digests = [{(c.agent, c.turn): c.output_sha256 for c in t.continuations} for t in (stock, toolgap)]
        places = sorted(digests[0].keys() | digests[1].keys())
        wrong = [place for place in places if digests[0].get(place) != digests[1].get(place)]
        total, agree = total + len(places), agree + len(places) - len(wrong)
        if wrong:
            where = ", ".join(f"agent {agent} turn {turn}" for agent, turn in wrong)
            different.append(f"`{stock.trial_id}` and `{toolgap.trial_id}`, round {number}: {where}")
    text = (
        f"{agree} of {total} answers to continuations are identical in both arms of their round, by the digest of "
        f"their ids; they have {tables.p50([one.output_tokens for t in trials for one in t.continuations])} tokens "
        "at the median. Once an answer differs, so do its agent's later prompts."
    )
    return "\n\n".join(filter(None, [text, tables.listed("Trials that differ", different)]))


# ---- a trial ----


def warm_up(stage: Stage) -> None:
    """Serve and restore once, for what is compiled or allocated on first use."""
    prompt = stage.stored("many-agents/warm-up", stage.plan.prompt_tokens[0])
    stage.restored(prompt.prefix_ids)
    stage.engine.generate(prompt.ids, max_new_tokens=OUTPUT_TOKENS)
    stage.drop(prompt)
    stage.settle()


def play(
    stage: Stage, cell: Cell, round_number: int, played: Sequence[Session], trace_sha256: str | None
) -> Crowd:
    """All agents of a round."""
    most_gap_s = Agents.of(stage.plan).most_gap_s
    crew = Crew(
        runs=[
            partial(_run, stage, cell.arm, f"many-agents/{round_number}/{number}", number, session)
            for number, session in enumerate(played)
        ],
        planned_turns=[len(session.turns) for session in played],
        together_tokens=sum(prompt_tokens(session)[-1] for session in played),
        cut_gaps=sum(turn.gap_s >= most_gap_s for session in played for turn in session.turns),
        trace_sha256=trace_sha256,
    )
    return play_crew(stage, cell, round_number, crew)


def _run(
    stage: Stage, arm: str, name: str, number: int, session: Session, helpers: Executor, stop: Event
) -> "Run":
    return Agent(stage, arm, name, number, helpers, stop).run(session)


class Crew(NamedTuple):
    """Those who are played at once."""

    runs: Sequence[Callable[[Executor, Event], "Run"]]
    """Each plays one agent, whose restores the executor waits for; it ends soon after the event is set."""
    planned_turns: list[int]
    together_tokens: int
    cut_gaps: int
    trace_sha256: str | None


def play_crew(stage: Stage, cell: Cell, round_number: int, crew: Crew) -> Crowd:
    """All agents, each in a thread of its own; what fails in one of them is raised, and ends the others."""
    plan, stop = stage.plan, Event()
    l2_tokens = stage.toolgap.overview().engine.host_total_tokens
    counters, began_ts, begin_s = stage.counters(COUNTERS), time.time(), time.perf_counter()
    # A restore and the question for its end may be under way for every turn at once: none waits for another.
    with (
        ThreadPoolExecutor(2 * sum(crew.planned_turns)) as helpers,
        ThreadPoolExecutor(len(crew.runs)) as threads,
    ):
        try:
            futures = [threads.submit(run, helpers, stop) for run in crew.runs]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    runs = [future.result() for future in futures]
    wall_s = time.perf_counter() - begin_s
    continuations = [one for run in runs for one in run.continuations]
    read = sum(one.read_tokens for one in continuations)
    after = stage.settled_counters(COUNTERS, PREFETCHED, counters[PREFETCHED] + read)
    stage.settle()
    trial = Crowd(
        trial_id=cell.trial_id(round_number),
        round=round_number,
        cell=cell,
        began_ts=round(began_ts, 6),
        page_cache=plan.page_cache,
        trace_sha256=crew.trace_sha256,
        l1_tokens=stage.l1_tokens,
        l2_tokens=l2_tokens,
        together_tokens=crew.together_tokens,
        planned_turns=crew.planned_turns,
        cut_gaps=crew.cut_gaps,
        first_ttft_ms=[run.first_ttft_ms for run in runs],
        continuations=continuations,
        wall_s=round(wall_s, 3),
        counters={name: round(after[name] - counters[name], 6) for name in COUNTERS},
    )
    trial.invalid = judge(trial)
    return trial


class Run(NamedTuple):
    """What one agent has measured."""

    first_ttft_ms: float
    continuations: list[Continuation]


class Agent:
    """Plays one session: a prompt, then a tool call and a continuation for each turn.

    Contract: restores never delay it; nothing of it is in flight when :meth:`run` returns; it ends soon
    after ``stop`` is set.
    """

    def __init__(
        self, stage: Stage, arm: str, name: str, number: int, helpers: Executor, stop: Event
    ) -> None:
        self._stage = stage
        self._restores = arm == TOOLGAP
        self._lead_s = Agents.of(stage.plan).lead_s
        self._name = name
        self._number = number
        self._helpers = helpers
        self._stop = stop
        self._salt = fresh_salt()

    def run(self, session: Session) -> Run:
        """The whole session, or its beginning if it was stopped."""
        turns = session.turns
        ids = self._ids("first", session.first_prompt_tokens)
        generation = self._generate(ids, turns[0].output_tokens)
        first_ttft_ms = _ms(generation.ttft_s)
        continuations: list[Continuation] = []
        outcomes: list[Future[OperationStatus | Code]] = []
        for number, turn in enumerate(turns):
            called_s = time.perf_counter()
            ids = ids + generation.output_ids
            prefix_ids = ids[: prefix_tokens(len(ids), self._stage.plan.page_tokens)]
            submitted = None
            if self._restores and prefix_ids:
                if self._lead_s is not None and self._stop.wait(max(0.0, turn.gap_s - self._lead_s)):
                    break
                ttl_s = min(turn.gap_s + TTL_BEYOND_GAP_S, MAX_TTL_S)
                submitted = self._helpers.submit(submit, self._stage.toolgap, prefix_ids, self._salt, ttl_s)
            ids = ids + self._ids(str(number), turn.append_tokens)
            if self._stop.wait(max(0.0, called_s + turn.gap_s - time.perf_counter())):
                break
            late_ms = _ms(time.perf_counter() - called_s - turn.gap_s)
            # A turn's answer ends in the next turn's tool call; the last one's leads nowhere.
            output_tokens = turns[min(number + 1, len(turns) - 1)].output_tokens
            generation = self._generate(ids, output_tokens)
            if submitted is not None:
                outcomes.append(self._helpers.submit(outcome, self._stage.toolgap, submitted))
            continuations.append(
                Continuation(
                    agent=self._number,
                    turn=number,
                    prompt_tokens=generation.prompt_tokens,
                    prefix_tokens=len(prefix_ids),
                    gap_s=round(turn.gap_s, 6),
                    late_ms=late_ms,
                    ttft_ms=_ms(generation.ttft_s),
                    device_tokens=generation.device_tokens,
                    host_tokens=generation.host_tokens,
                    storage_tokens=generation.storage_tokens,
                    output_tokens=len(generation.output_ids),
                    output_sha256=_digest(generation.output_ids),
                )
            )
        # Only prefixes shorter than a page are not submitted, and prompts only grow: those come first.
        for one, ended in zip(reversed(continuations), reversed(outcomes), strict=False):
            note(one, ended.result())
        return Run(first_ttft_ms, continuations)

    def _generate(self, ids: Sequence[int], tokens: int) -> Generation:
        return self._stage.engine.generate(ids, max_new_tokens=tokens, cache_salt=self._salt)

    def _ids(self, what: str, tokens: int) -> list[int]:
        return prompt_ids(self._stage.plan.seed, f"{self._name}/{what}", tokens, VOCABULARY)


def submit(toolgap: Toolgap, prefix_ids: Sequence[int], salt: str, ttl_s: float) -> str | Code:
    """The operation's id, or why there is none; what is no refusal to be counted is raised."""
    try:
        return toolgap.submit(input_ids=prefix_ids, cache_salt=salt, ttl_s=ttl_s).operation_id
    except ToolgapError as refusal:
        if refusal.status_code not in REFUSALS:
            raise
        return refusal.error.code


def outcome(toolgap: Toolgap, submitted: "Future[str | Code]") -> OperationStatus | Code:
    """How the operation ended; a code if it was refused, or ended so long ago that the server forgot it."""
    operation_id = submitted.result()
    if isinstance(operation_id, Code):
        return operation_id
    try:
        return toolgap.wait(operation_id, RESTORE_DEADLINE_S)
    except ToolgapError as error:
        if error.error.code is not Code.UNKNOWN_OPERATION:
            raise
        return Code.UNKNOWN_OPERATION


def note(one: Continuation, ended: OperationStatus | Code) -> None:
    """Write a restore's end down with its continuation."""
    if isinstance(ended, Code):
        one.refused = str(ended)
        return
    one.state = str(ended.state)
    one.reason = None if ended.reason is None else str(ended.reason)
    one.resident_tokens = ended.resident_tokens
    one.read_tokens = ended.read_tokens
    one.joined_requests = ended.joined_requests
    one.used_tokens = ended.used_tokens


def _digest(output_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, output_ids)).encode()).hexdigest()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
