"""An agent's continuations through a gateway that restores, and through one that does not."""

import os
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, Self

import httpx

from toolgap.bench import tables
from toolgap.bench.chat import Answer, Chat, Message
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import Manifest
from toolgap.bench.gateway_turns import ARMS, RESTORED, RULES, USED, WITH, WITHOUT, Turn, expected_told, judge
from toolgap.bench.plan import OUTPUT_TOKENS, Cell, Plan
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import POLL_S, RESTORE_DEADLINE_S, Stage
from toolgap.bench.validity import COUNTERS, PREFETCHED
from toolgap.childserver import ChildServer, free_port
from toolgap.engineclient import read_samples
from toolgap.protocol import OperationStatus

CHECK_INTERVAL_S = 60
"""SGLang makes a token for every health check: two gateways with the default of 5 s would be heard in the times."""

START_DEADLINE_S = 240.0
PAUSE_DEADLINE_S = 60.0
TOLD_DEADLINE_S = 5.0
PREFIX = "toolgap_gateway_"
REFUSED = "restores_refused_total"

TOOL = "count_lines"
PATH = "/var/log/agent.log"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Counts the lines of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "enum": [PATH]}},
                "required": ["path"],
            },
        },
    }
]
RESULT = f"1284 {PATH}"
CALL_TOKENS = 64
"""Longest answer that calls the tool."""


class ThroughGateway(Recipe[Turn]):
    """Two gateways before one server; an agent that asks through one of them, and whose tool tells when it ends."""

    name = "gateway"
    says = "an agent's continuations through `toolgap gateway`, with restores and without"
    trial_type = Turn
    defaults: ClassVar[dict[str, Any]] = {"gaps_ms": (0.0, 1000.0), "arms": tuple(ARMS)}
    # By this grammar any model calls the tool that it is told to, even one that never learned to.
    server_arguments = ("--tool-call-parser", "pythonic", "--constrained-json-disable-any-whitespace")

    def cells(self, plan: Plan) -> list[Cell]:
        """Both ways at every gap."""
        return [
            Cell(prompt_tokens=tokens, arm=arm, gap_ms=gap_ms)
            for tokens in plan.prompt_tokens
            for arm in plan.arms
            for gap_ms in plan.gaps_ms
        ]

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        with ExitStack() as stack:
            logs = Path(stack.enter_context(TemporaryDirectory(prefix="toolgap-bench-gateway-")))
            say("starting two gateways")
            fronts = {
                arm: stack.enter_context(started(stage, logs / arm, restores=arm == WITH))
                for arm in plan.arms
            }
            direct = stack.enter_context(Chat(stage.engine.url, stage.engine.api_key))
            scenes: dict[tuple[int, int], Scene] = {}

            def scene(number: int, tokens: int) -> Scene:
                if (number, tokens) not in scenes:
                    say(f"asking the server directly: round {number}, {tokens:,} tokens")
                    scenes[number, tokens] = set_scene(stage, direct, f"{number}/{tokens}", tokens)
                return scenes[number, tokens]

            for cell in {(cell.prompt_tokens, cell.arm): cell for cell in self.cells(plan)}.values():
                say(f"warming up: {cell.prompt_tokens:,} tokens, {cell.arm}")
                play(stage, fronts[cell.arm], scene(1_000_000, cell.prompt_tokens), cell, 1_000_000)
            for trial_id, cell, number in self.left(plan, done):
                set_up = scene(number, cell.prompt_tokens)
                yield Step(trial_id, partial(play, stage, fronts[cell.arm], set_up, cell, number))

    def ttft_ms(self, trial: Turn) -> Sequence[float]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return (trial.ttft_ms,)

    def label(self, cell: Cell) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return f"{cell.arm} restores"

    def judge(self, trial: Turn) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return judge(trial)

    def report(self, manifest: Manifest, trials: Sequence[Turn]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        plan = manifest.plan
        parts = [
            "An agent's turn is asked for through a gateway, by streamed chat completions, and calls a tool. When the "
            "gateway has done what it does then, L1 and L2 are emptied, as other work would in time. The *gap* runs "
            "from the hint that the tool has ended to the continuation, which is streamed through the same gateway; "
            "at 0 ms it follows the hint at once. Both gateways run all the time before the same server; each asks it "
            f"every {CHECK_INTERVAL_S} s how it is."
        ]
        for tokens in plan.prompt_tokens:
            own = [t for t in trials if t.cell.prompt_tokens == tokens and not t.invalid]
            if own:
                parts += [
                    f"## {tokens:,} prompt tokens, {own[0].prefix_tokens:,} of them the prefix",
                    _times(plan, own),
                    _restores(plan, own),
                ]
        parts += [
            "## Arms",
            "\n".join(f"- **{arm}**: {ARMS[arm]}" for arm in plan.arms),
            "## Validity",
            "A trial counts only if every rule holds:",
            "\n".join(f"- *{rule}*: {says}" for rule, says in RULES.items()),
            tables.outputs(trials),
        ]
        return "\n\n".join(parts)


def _of(trials: Sequence[Turn], arm: str, gap_ms: float) -> list[Turn]:
    return [t for t in trials if (t.cell.arm, t.cell.gap_ms) == (arm, gap_ms)]


def _times(plan: Plan, trials: Sequence[Turn]) -> str:
    rows = []
    for gap_ms in plan.gaps_ms:
        without, with_ = (Spread.of(t.ttft_ms for t in _of(trials, arm, gap_ms)) for arm in (WITHOUT, WITH))
        row = [f"{gap_ms:g} ms", tables.spread(without), tables.spread(with_), tables.ratio(without, with_)]
        rows.append(row)
    head = ["gap", "TTFT without, ms", "TTFT with, ms", "without / with"]
    return f"Median [least, most] of the valid trials (their number).\n\n{tables.table(head, rows)}"


def _restores(plan: Plan, trials: Sequence[Turn]) -> str:
    rows = []
    for gap_ms in plan.gaps_ms:
        own = _of(trials, WITH, gap_ms)
        rows.append(
            [
                f"{gap_ms:g} ms",
                f"{sum(t.from_host for t in own)} of {len(own)}",
                str(sum(t.joined for t in own)),
                tables.spread(Spread.of(expected_told(t.operations)[RESTORED] for t in own)),
                tables.spread(Spread.of(expected_told(t.operations)[USED] for t in own)),
                tables.spread(Spread.of(t.hint_ms for t in own if t.hint_ms is not None)),
                tables.spread(Spread.of(t.late_ms for t in own)),
            ]
        )
    head = ["gap", "prefix in host memory", "joined", "tokens restored", "used", "hint's reply, ms"]
    return (
        "What became of the restores, by the server. The gateway counts the same where the hint came before the "
        "continuation (rule *told*); where the continuation comes before the server has answered the submit, it may "
        "count less, and the continuation joins the read or reads by itself. "
        "*Late* is by how much the continuation left later than the gap asks for.\n\n"
        f"{tables.table([*head, 'late, ms'], rows)}"
    )


# ---- playing ----


class Front:
    """A running gateway, and the agent's connection to it."""

    def __init__(self, url: str, api_key: str | None, *, restores: bool) -> None:
        self.restores = restores
        self.chat = Chat(url, api_key)
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.chat.__exit__()
        self._http.close()

    def metrics(self) -> dict[str, float]:
        """The gateway's own, without the prefix of their names, summed over their labels."""
        text = self._http.get("/metrics").raise_for_status().text
        return {name.removeprefix(PREFIX): value for name, value in read_samples(text).items()}

    def await_pause(self, before: dict[str, float]) -> None:
        """Wait until the gateway has seen one more answer that calls a tool, and what it has submitted has ended.

        Raises:
            BenchError: it has not, in a minute.
        """
        ended = ("restores_total", REFUSED)
        end = time.monotonic() + PAUSE_DEADLINE_S
        while True:
            now = self.metrics()
            if now["turns_total"] > before["turns_total"] and any(
                now.get(name, 0.0) > before.get(name, 0.0) for name in ended
            ):
                return
            if time.monotonic() > end:
                raise BenchError(f"the gateway has seen no tool call in an answer for {PAUSE_DEADLINE_S:g} s")
            time.sleep(POLL_S)

    def settled(self, before: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
        """How its metrics have changed, once that is as expected; whatever it is after some seconds.

        The gateway asks what was used of a restore when the answer has left.
        """
        end = time.monotonic() + TOLD_DEADLINE_S
        while True:
            now = self.metrics()
            found = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in expected}
            if found == expected or time.monotonic() > end:
                return found
            time.sleep(POLL_S)

    def tool_ended(self, call_id: str) -> None:
        """Send the hint.

        Raises:
            BenchError: the gateway does not take it.
        """
        reply = self._http.post("/toolgap/hints", json={"tool_call_id": call_id, "ended": True})
        if reply.status_code != 200:
            raise BenchError(f"the gateway answered {reply.status_code} to a hint: {reply.text[:300]}")


@contextmanager
def started(stage: Stage, log: Path, *, restores: bool) -> Iterator[Front]:
    """A gateway before the stage's server, from its start to its end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "toolgap", "gateway", "--port", str(port)]
    command += ["--upstream", stage.engine.url, "--check-interval-s", str(CHECK_INTERVAL_S)]
    command += [] if restores else ["--no-restore"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOOLGAP_")}
    with ChildServer(command, f"{url}/readyz", log, environment) as child:
        child.wait_until_healthy(START_DEADLINE_S)
        with Front(url, stage.engine.api_key, restores=restores) as running:
            yield running
        child.check_running()


class Scene(NamedTuple):
    """A turn that is played in every arm, and what the server said to it directly."""

    messages: list[Message]
    arguments: str
    output_ids: list[int]


def set_scene(stage: Stage, direct: Chat, name: str, tokens: int) -> Scene:
    """A turn of at most so many prompt tokens, and the server's own answers to it, computed anew."""
    messages = _messages(stage, name, tokens)
    stage.settle()
    turn = _turn(direct, messages, f"direct/{name}")
    stage.settle()
    answer = _continue(direct, messages, turn, f"direct/{name}")
    stage.settle()
    return Scene(messages, turn.calls[0].arguments, answer.output_ids)


def _messages(stage: Stage, name: str, tokens: int) -> list[Message]:
    rng = random.Random(f"turn/{stage.plan.seed}/{stage.nonce}{name}")  # noqa: S311 - to be repeatable
    numbers = [str(rng.randrange(100, 1000)) for _ in range(tokens)]

    def messages(count: int) -> list[Message]:
        begin = f"{' '.join(numbers[:count])}: these are the numbers of yesterday."
        return [
            {"role": "system", "content": f"{begin} You look after the files of one machine."},
            {"role": "user", "content": f"How many lines has {PATH}?"},
        ]

    def length(count: int) -> int:
        return len(stage.engine.tokenize_chat(messages(count), TOOLS, answer=True))

    # The shortest one that is too long is one number longer than what is looked for.
    count = bisect_right(range(tokens), tokens, key=length) - 1
    if count < 0:
        raise BenchError(f"the turn alone has {length(0):,} tokens: raise --prompt-tokens")
    return messages(count)


def _turn(chat: Chat, messages: Sequence[Message], session: str) -> Answer:
    answer = chat.ask(messages, TOOLS, session=session, max_tokens=CALL_TOKENS, call=TOOL)
    if len(answer.calls) != 1:
        raise BenchError(
            f"the answer has {len(answer.calls)} tool calls and not one: the server needs "
            f"{' '.join(ThroughGateway.server_arguments)}"
        )
    return answer


def _continue(chat: Chat, messages: Sequence[Message], turn: Answer, session: str) -> Answer:
    result = {"role": "tool", "tool_call_id": turn.calls[0].call_id, "content": RESULT}
    return chat.ask([*messages, turn.message(), result], TOOLS, session=session, max_tokens=OUTPUT_TOKENS)


def play(stage: Stage, front: Front, scene: Scene, cell: Cell, round_number: int) -> Turn:
    """Play one trial, and leave the stage as it was."""
    trial_id = cell.trial_id(round_number)
    pages = stage.pages()
    before = front.metrics()
    turn = _turn(front.chat, scene.messages, trial_id)
    if front.restores:
        front.await_pause(before)
    stage.flush()
    page_cache_share = stage.prepare_page_cache(stage.pages() - pages)
    known = {status.operation_id for status in _operations(stage)}
    counters, before = stage.counters(COUNTERS), front.metrics()

    began_ts, called_s = time.time(), time.perf_counter()
    hint_ms = None
    if front.restores:
        front.tool_ended(turn.calls[0].call_id)
        hint_ms = _ms(time.perf_counter() - called_s)
    gap_s = cell.gap_ms / 1e3
    time.sleep(max(0.0, called_s + gap_s - time.perf_counter()))
    sent_s = time.perf_counter()
    answer = _continue(front.chat, scene.messages, turn, trial_id)

    page = stage.plan.page_tokens
    prefix_tokens = turn.prompt_tokens // page * page
    after = stage.settled_counters(COUNTERS, PREFETCHED, counters[PREFETCHED] + prefix_tokens)
    operations = [
        stage.toolgap.wait(status.operation_id, RESTORE_DEADLINE_S)
        for status in _operations(stage)
        if status.operation_id not in known
    ]
    trial = Turn(
        trial_id=trial_id,
        round=round_number,
        cell=cell,
        prefix_tokens=prefix_tokens,
        turn_tokens=(turn.prompt_tokens + len(turn.output_ids)) // page * page,
        prompt_tokens=answer.prompt_tokens,
        began_ts=round(began_ts, 6),
        page_cache=stage.plan.page_cache,
        page_cache_share=page_cache_share,
        gap_ms=_ms(sent_s - called_s),
        late_ms=_ms(sent_s - called_s - gap_s),
        ttft_ms=_ms(answer.ttft_s),
        total_ms=_ms(answer.total_s),
        arguments=turn.calls[0].arguments,
        reference_arguments=scene.arguments,
        output_ids=answer.output_ids,
        reference_ids=scene.output_ids,
        device_tokens=answer.device_tokens,
        host_tokens=answer.host_tokens,
        storage_tokens=answer.storage_tokens,
        counters={name: round(after[name] - counters[name], 6) for name in COUNTERS},
        operations=operations,
        told=front.settled(before, expected_told(operations)),
        hint_ms=hint_ms,
        refused=round(front.metrics().get(REFUSED, 0.0) - before.get(REFUSED, 0.0)),
    )
    trial.invalid = judge(trial)
    stage.settle()
    return trial


def _operations(stage: Stage) -> list[OperationStatus]:
    overview = stage.toolgap.overview()
    return [*overview.active, *overview.recent]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
