"""What a gateway has recorded, played again: the same sizes or prompts, gaps and sessions at once, both ways."""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, NamedTuple

from toolgap.bench import recordings
from toolgap.bench.arms import Arm
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import sha256
from toolgap.bench.plan import Cell, Plan, prefix_tokens, prompt_ids
from toolgap.bench.recipe import Step
from toolgap.bench.recipes.many_agents import (
    ARMS,
    STOCK,
    TOOLGAP,
    TTL_BEYOND_GAP_S,
    Continuation,
    Crew,
    Crowd,
    ManyAgents,
    Run,
    note,
    outcome,
    play_crew,
    submit,
    warm_up,
)
from toolgap.bench.server import Setup
from toolgap.bench.stage import VOCABULARY, Stage, fresh_salt
from toolgap.client import PrefixFields, Toolgap, ToolgapError
from toolgap.protocol import MAX_TTL_S, Code, OperationStatus

MOST_SESSIONS = 64
"""At once or not, each is a thread; more are left out unless the plan says so."""

MOST_OUTPUT_TOKENS = 32


class Options(NamedTuple):
    """How a recording is played, from the plan's options."""

    recording: Path
    speed: float
    tokens_scale: float
    most_output_tokens: int
    most_sessions: int
    lead_s: float | None
    """How long before the tool returns its prefix is submitted, in seconds; None for when the tool call leaves."""

    @classmethod
    def of(cls, plan: Plan) -> "Options":
        """With the defaults for what the plan leaves open.

        Raises:
            BenchError: there is no recording, or an option has no such value.
        """
        options = plan.options
        if not isinstance(recording := options.get("recording"), str):
            raise BenchError("name the recording: toolgap bench replay FILE")
        found = cls(
            recording=Path(recording),
            speed=float(options.get("speed", 1.0)),
            tokens_scale=float(options.get("tokens_scale", 1.0)),
            most_output_tokens=int(options.get("most_output_tokens", MOST_OUTPUT_TOKENS)),
            most_sessions=int(options.get("most_sessions", MOST_SESSIONS)),
            lead_s=None if (lead_s := options.get("lead_s")) is None else float(lead_s),
        )
        if min(found[1:5]) <= 0:
            raise BenchError("speed, tokens_scale, most_output_tokens and most_sessions are greater than 0")
        return found


def chosen(plan: Plan, recorded: Sequence[recordings.Session]) -> list[recordings.Session]:
    """What of a recording is played.

    Raises:
        BenchError: nothing, or no continuation of a tool call.
    """
    options = Options.of(plan)
    fitting = [
        session
        for one in recorded
        if (
            session := recordings.scaled(
                one,
                speed=options.speed,
                tokens=options.tokens_scale,
                most_prompt_tokens=plan.prompt_tokens[0],
                most_output_tokens=options.most_output_tokens,
            )
        )
    ][: options.most_sessions]
    if not sum(map(recordings.continuations, fitting)):
        raise BenchError(
            f"the recording has {sum(map(recordings.continuations, recorded))} continuations of tool calls, and "
            f"none with prompts of at most {plan.prompt_tokens[0]:,} tokens: raise --prompt-tokens, or make "
            "--tokens-scale smaller"
        )
    return fitting


class Line(NamedTuple):
    """A request of a session that is ready to be sent."""

    request: recordings.Request
    ids: "array[int] | None"
    """Of its prompt; None for one that is made up as it is played."""
    ahead_ids: "array[int] | None"
    """What the next prompt certainly begins with, if that is known of what was said."""


class Script(NamedTuple):
    """A session that is ready to be played."""

    begin_s: float
    lines: list[Line]


def scripts(toolgap: Toolgap, played: Sequence[recordings.Session]) -> list[Script]:
    """Sessions with the tokens of what was said, as this server makes its prompts.

    Raises:
        BenchError: the server makes no prompt of it.
    """
    return [
        Script(
            session.begin_s,
            [
                Line(request, _resolved(toolgap, request.prompt), _resolved(toolgap, request.ahead))
                for request in session.requests
            ],
        )
        for session in played
    ]


def _resolved(toolgap: Toolgap, fields: PrefixFields | None) -> "array[int] | None":
    if fields is None:
        return None
    try:
        return array("q", toolgap.resolve(**fields).token_ids)
    except ToolgapError as refusal:
        raise BenchError(f"the server makes no prompt of what was recorded: {refusal}") from refusal


class Replay(ManyAgents):
    """Recorded sessions, each in a thread of its own, with restores at each tool call or without."""

    name = "replay"
    says = "sessions that a gateway has recorded, with their gaps and as many at once (toolgap bench replay)"
    defaults: ClassVar[dict[str, Any]] = {"prompt_tokens": (8192,), "gaps_ms": (0.0,), "arms": ARMS}

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        options = Options.of(plan)
        if not set(self.planned(plan)) - done:
            return
        if len(plan.prompt_tokens) > 1 or plan.page_cache == "cold" or set(plan.arms) - set(ARMS):
            raise BenchError(
                f"{self.name} takes one prompt size, the arms {' and '.join(ARMS)}, and no cold page cache, since "
                "its trials write the files that they read"
            )
        played = chosen(plan, recordings.sessions(recordings.read(options.recording)))
        digest = sha256(options.recording)
        say("warming up")
        warm_up(stage)
        say("making prompts of what was said")
        ready = scripts(stage.toolgap, played)
        for trial_id, cell, number in self.left(plan, done):
            yield Step(trial_id, partial(play, stage, cell, number, ready, digest, options.lead_s))

    def check(self, plan: Plan) -> None:
        """See :class:`~toolgap.bench.recipe.Recipe`: the recording is read, and something of it fits."""
        chosen(plan, recordings.sessions(recordings.read(Options.of(plan).recording)))

    def setting(self, plan: Plan, trials: Sequence[Crowd]) -> str:
        """See :class:`~toolgap.bench.recipes.many_agents.ManyAgents`."""
        options = Options.of(plan)
        digests = ", ".join(sorted({trial.trace_sha256 for trial in trials if trial.trace_sha256}))
        when = "when the tool call leaves"
        if options.lead_s is not None:
            when = f"{options.lead_s:g} s before the tool returns, as one can who is told when it will"
        sizes = {
            (len(trial.planned_turns), sum(trial.planned_turns), trial.together_tokens) for trial in trials
        }
        played = ", ".join(
            f"{sessions} sessions with {turns} continuations of tool calls, and {together:,} tokens in their last "
            "prompts"
            for sessions, turns, together in sorted(sizes)
        )
        return (
            f"The recording with SHA-256 {digests or 'unknown'}: {played or 'nothing'}. Gaps and begins divided by "
            f"{options.speed:g}, made-up sizes times {options.tokens_scale:g}, prompts of at most "
            f"{plan.prompt_tokens[0]:,} tokens, answers of at most {options.most_output_tokens}. A session waits for "
            "its answers, so that a slower server is asked later. What was recorded with its content is prompted with "
            "that; else prompts of the same sizes are made up. What follows an answer without tool calls is served, "
            f"and not counted. *{STOCK}* is arm {Arm.ON_REQUEST}, restore on request, and submits nothing; *{TOOLGAP}* "
            f"is arm {Arm.AHEAD}, and submits the prefix {when}. Both arms of a round play the same, and share no KV."
        )


def play(
    stage: Stage,
    cell: Cell,
    round_number: int,
    ready: Sequence[Script],
    digest: str,
    lead_s: float | None,
) -> Crowd:
    """All sessions of the recording, once."""
    begun_s = time.perf_counter()
    players = [
        Player(stage, cell.arm, f"replay/{round_number}/{number}", number, lead_s, begun_s)
        for number in range(len(ready))
    ]
    crew = Crew(
        runs=[partial(player.run, script) for player, script in zip(players, ready, strict=True)],
        planned_turns=[sum(line.request.calls for line in script.lines[:-1]) for script in ready],
        together_tokens=sum(script.lines[-1].request.prompt_tokens for script in ready),
        cut_gaps=0,
        trace_sha256=digest,
    )
    return play_crew(stage, cell, round_number, crew)


class Player:
    """Plays one recorded session.

    Contract: restores never delay it; nothing of it is in flight when :meth:`run` returns; it ends soon after
    ``stop`` is set.
    """

    def __init__(
        self, stage: Stage, arm: str, name: str, number: int, lead_s: float | None, begun_s: float
    ) -> None:
        self._stage, self._name, self._number = stage, name, number
        self._restores, self._lead_s, self._begun_s = arm == TOOLGAP, lead_s, begun_s
        self._salt = fresh_salt()

    def run(self, script: Script, helpers: Executor, stop: Event) -> Run:
        """The whole session, or its beginning if it was stopped."""
        continuations: list[Continuation] = []
        outcomes: list[tuple[Continuation, Future[OperationStatus | Code]]] = []
        first_ttft_ms = 0.0
        due_s = self._begun_s + script.begin_s
        known: list[int] = []
        ahead: list[int] = []
        submitted: Future[str | Code] | None = None
        for number, line in enumerate(script.lines):
            if stop.wait(max(0.0, due_s - time.perf_counter())):
                break
            late_s = time.perf_counter() - due_s
            ids = self._prompt(number, line, known)
            generation = self._stage.engine.generate(
                ids, max_new_tokens=line.request.output_tokens, cache_salt=self._salt
            )
            before = script.lines[number - 1].request if number else None
            if before is None:
                first_ttft_ms = _ms(generation.ttft_s)
            elif before.calls:
                one = Continuation(
                    agent=self._number,
                    turn=len(continuations),
                    prompt_tokens=generation.prompt_tokens,
                    prefix_tokens=self._whole(_shared(known, ids)),
                    gap_s=round(before.gap_s, 6),
                    late_ms=_ms(late_s),
                    ttft_ms=_ms(generation.ttft_s),
                    device_tokens=generation.device_tokens,
                    host_tokens=generation.host_tokens,
                    storage_tokens=generation.storage_tokens,
                    output_tokens=len(generation.output_ids),
                    output_sha256=_digest(generation.output_ids),
                )
                continuations.append(one)
                if submitted is not None:
                    outcomes.append((one, helpers.submit(outcome, self._stage.toolgap, submitted)))
            known = [*ids, *generation.output_ids]
            ahead = known if line.ahead_ids is None else list(line.ahead_ids)
            due_s = time.perf_counter() + line.request.gap_s
            submitted = None
            if self._restores and line.request.calls and number + 1 < len(script.lines):
                if self._lead_s is not None and stop.wait(max(0.0, line.request.gap_s - self._lead_s)):
                    break
                submitted = self._submit(ahead, line.request.gap_s, helpers)
        for one, ended in outcomes:
            note(one, ended.result())
        return Run(first_ttft_ms, continuations)

    def _prompt(self, number: int, line: Line, known: Sequence[int]) -> list[int]:
        if line.ids is not None:
            return list(line.ids)
        # What a session says next is no longer than its recorded prompt was, and never nothing.
        more = max(1, line.request.prompt_tokens - len(known))
        return [*known, *prompt_ids(self._stage.plan.seed, f"{self._name}/{number}", more, VOCABULARY)]

    def _submit(self, ids: Sequence[int], gap_s: float, helpers: Executor) -> "Future[str | Code] | None":
        prefix_ids = ids[: self._whole(len(ids))]
        if not prefix_ids:
            return None
        ttl_s = min(gap_s + TTL_BEYOND_GAP_S, MAX_TTL_S)
        return helpers.submit(submit, self._stage.toolgap, prefix_ids, self._salt, ttl_s)

    def _whole(self, tokens: int) -> int:
        return prefix_tokens(tokens, self._stage.plan.page_tokens)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _digest(output_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, output_ids)).encode()).hexdigest()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
