"""What Toolgap costs while it does nothing: throughput with the plugin loaded and idle, against stock."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any, ClassVar, NamedTuple

import msgspec

from toolgap.bench import tables
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import Manifest
from toolgap.bench.load import Burst, cached_tokens, closed_loop, outputs_sha256
from toolgap.bench.plan import Cell, Plan, prompt_ids
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import VOCABULARY, Stage
from toolgap.client import ToolgapUnreachable

STOCK, TOOLGAP = "stock", "toolgap"

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "toolgap"
"""Its entry point there; the others, ``toolgap_cpu`` among them, are in both servers."""

ALLOW_LIST = "SGLANG_PLUGINS"

INTERVAL_ROUNDS = 6
"""The fewest whose range holds the median of ratios with 95 % confidence."""


class Demand(NamedTuple):
    """The load of a burst, from the plan's options."""

    concurrency: int
    requests: int
    output_tokens: int

    @classmethod
    def of(cls, plan: Plan) -> "Demand":
        """With the defaults for what the plan leaves open."""
        options = plan.options
        return cls(
            concurrency=int(options.get("concurrency", 4)),
            requests=int(options.get("requests", 16)),
            output_tokens=int(options.get("output_tokens", 32)),
        )


class Throughput(msgspec.Struct, kw_only=True):
    """One burst on one server. Lists have one item a request."""

    trial_id: str
    round: int
    cell: Cell
    """Its arm is the server."""
    began_ts: float
    plugins: str
    """SGLang's list of the plugins that this server may load."""
    endpoint: bool
    """Whether the server answered as Toolgap does."""
    concurrency: int
    planned_requests: int
    planned_output_tokens: int
    """Of each request."""
    wall_s: float
    """From the first request sent to the last answer's end."""
    ttft_ms: list[float]
    total_ms: list[float]
    output_tokens: list[int]
    cached_tokens: int
    outputs_sha256: str
    invalid: list[str] = []

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return sum(self.output_tokens) / self.wall_s

    @property
    def requests_per_s(self) -> float:
        """Answered requests a second."""
        return len(self.output_tokens) / self.wall_s


def judge(trial: Throughput) -> list[str]:
    """The rules that did not hold."""
    found = []
    if trial.endpoint != (trial.cell.arm == TOOLGAP):
        found.append(f"plugin: the server {'has' if trial.endpoint else 'lacks'} Toolgap's endpoint")
    if (served := len(trial.output_tokens)) != trial.planned_requests:
        found.append(f"served: {served} of {trial.planned_requests} requests")
    if short := [tokens for tokens in trial.output_tokens if tokens != trial.planned_output_tokens]:
        found.append(
            f"outputs: {len(short)} requests generated not {trial.planned_output_tokens} tokens but {short[0]}"
        )
    if trial.cached_tokens:
        found.append(f"uncached: {trial.cached_tokens} prompt tokens were cached")
    return found


RULES = (
    "the server has Toolgap's endpoint in the arm toolgap and lacks it in stock; every planned request was served "
    "and generated exactly the planned tokens; nothing of a prompt was cached"
)


class Pair(NamedTuple):
    """A round's two bursts, with the same prompts."""

    round: int
    stock: Throughput
    toolgap: Throughput

    @property
    def ratio(self) -> float:
        """Toolgap's throughput in multiples of stock's."""
        return self.toolgap.tokens_per_s / self.stock.tokens_per_s

    @property
    def same_outputs(self) -> bool:
        """Whether both generated the same ids."""
        return self.stock.outputs_sha256 == self.toolgap.outputs_sha256


def pairs(trials: Sequence[Throughput], prompt_tokens: int) -> list[Pair]:
    """The rounds whose bursts are both valid."""
    valid = {
        (t.round, t.cell.arm): t for t in trials if t.cell.prompt_tokens == prompt_tokens and not t.invalid
    }
    return [
        Pair(number, valid[number, STOCK], valid[number, TOOLGAP])
        for number in sorted({number for number, _ in valid})
        if {(number, STOCK), (number, TOOLGAP)} <= valid.keys()
    ]


class Interval(NamedTuple):
    """Bounds of a median by order statistics, which assume nothing of the distribution."""

    low: float
    high: float
    low_rank: int
    """From 1, the least."""
    high_rank: int
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """The narrowest symmetric pair of ranks that holds the median with that confidence; None of too few values.

    The number of values below the median is binomial, so ranks k and n + 1 - k miss it with a probability
    of 2 P(fewer than k of n).
    """
    ordered, count = sorted(values), len(values)
    found = None
    missed = 0.0
    for rank in range(1, (count + 1) // 2 + 1):
        missed += 2 * math.comb(count, rank - 1) / 2**count
        if 1 - missed < confidence:
            break
        found = Interval(ordered[rank - 1], ordered[count - rank], rank, count + 1 - rank, 1 - missed)
    return found


class Overhead(Recipe[Throughput]):
    """Bursts on two servers that differ in nothing but the plugin, in turn."""

    name = "overhead"
    says = "throughput with the plugin loaded and idle, against stock"
    trial_type = Throughput
    defaults: ClassVar[dict[str, Any]] = {
        "prompt_tokens": (1024,),
        "gaps_ms": (0.0,),
        "arms": (STOCK, TOOLGAP),
        # Room in L1 for all requests in flight.
        "options": {"l1_tokens": 5120},
    }
    own_servers = True

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`.

        Raises:
            BenchError: L1 has no room for the requests that are to be in flight.
        """
        assert setup is not None
        if not set(self.planned(plan)) - done:
            return
        check_room(plan, setup.l1_tokens)
        with ExitStack() as servers:
            stages: dict[str, Stage] = {}
            lists: dict[str, str] = {}
            for arm in plan.arms:
                own, lists[arm] = of_arm(setup, arm)
                say(f"starting SGLang: {arm}")
                stages[arm] = servers.enter_context(own.running())
            for cell in self.cells(plan):
                say(f"warming up: {cell.prompt_tokens:,} tokens, {cell.arm}")
                burst(stages[cell.arm], cell, "warm-up")
            for trial_id, cell, number in self.left(plan, done):
                yield Step(trial_id, partial(play, stages[cell.arm], cell, number, lists[cell.arm]))

    def judge(self, trial: Throughput) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return judge(trial)

    def report(self, manifest: Manifest, trials: Sequence[Throughput]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        plan, demand = manifest.plan, Demand.of(manifest.plan)
        parts = [
            f"A burst is {demand.requests} requests of {demand.output_tokens} generated tokens each, "
            f"{demand.concurrency} in flight at a time, on one of two servers that run side by side and differ in "
            f"nothing but the plugin `{PLUGIN_NAME}` being loaded; nothing is restored. Both bursts of a round "
            "have the same prompts."
        ]
        for tokens in plan.prompt_tokens:
            own = pairs(trials, tokens)
            same = [pair for pair in own if pair.same_outputs]
            parts += [
                f"## {tokens:,} prompt tokens",
                _servers(trials, tokens),
                _rounds(own),
                _ratio([pair.ratio for pair in same]),
                tables.listed(
                    "Left out of the ratio, because the output ids differ between the two servers",
                    [f"round {pair.round}: ratio {pair.ratio:.4f}" for pair in own if not pair.same_outputs],
                ),
            ]
        loaded = sorted({f"- {trial.cell.arm}: `{trial.plugins}`" for trial in trials})
        parts += [
            f"## Plugins that each server may load (`{ALLOW_LIST}`)",
            "\n".join(loaded),
            "## Validity",
            f"A burst counts only if {RULES}. A round counts only if both of its bursts do and the output ids of "
            "both are identical.",
        ]
        return "\n\n".join(part for part in parts if part)


def _servers(trials: Sequence[Throughput], prompt_tokens: int) -> str:
    rows = []
    for arm in (STOCK, TOOLGAP):
        own = [
            t for t in trials if t.cell.prompt_tokens == prompt_tokens and t.cell.arm == arm and not t.invalid
        ]
        rows.append(
            [
                arm,
                tables.spread(Spread.of(trial.tokens_per_s for trial in own)),
                tables.spread(Spread.of(trial.requests_per_s for trial in own)),
                tables.p50([value for trial in own for value in trial.ttft_ms]),
                tables.p50([value for trial in own for value in trial.total_ms]),
            ]
        )
    head = ["server", "generated tokens/s", "requests/s", "TTFT p50, ms", "whole request p50, ms"]
    return f"Median [least, most] of the valid bursts (their number).\n\n{tables.table(head, rows)}"


def _rounds(own: Sequence[Pair]) -> str:
    if not own:
        return "No round has two valid bursts."
    rows = [
        [
            str(pair.round),
            tables.number(pair.stock.tokens_per_s),
            tables.number(pair.toolgap.tokens_per_s),
            f"{pair.ratio:.4f}",
            "identical" if pair.same_outputs else "differ",
        ]
        for pair in own
    ]
    return tables.table(
        ["round", "stock, tokens/s", "toolgap, tokens/s", "toolgap / stock", "output ids"], rows
    )


def _ratio(ratios: Sequence[float]) -> str:
    spread = Spread.of(ratios)
    if spread is None:
        return ""
    lines = [
        f"Toolgap / stock, paired by round: median {spread.p50:.4f} [{spread.low:.4f}, {spread.high:.4f}] of "
        f"{spread.trials} rounds."
    ]
    if interval := median_interval(ratios):
        lines.append(
            f"95 % interval of the median by order statistics: {interval.low:.4f} to {interval.high:.4f}, the ratios "
            f"of rank {interval.low_rank} and {interval.high_rank} of {spread.trials} (exact coverage "
            f"{interval.coverage * 100:.1f} %)."
        )
    else:
        lines.append(f"An interval of the median takes {INTERVAL_ROUNDS} rounds.")
    return " ".join(lines)


def check_room(plan: Plan, l1_tokens: int) -> None:
    """Check that L1 holds what is in flight: requests that queue would hide what a step costs.

    Raises:
        BenchError: it does not.
    """
    demand = Demand.of(plan)
    needed = demand.concurrency * (max(plan.prompt_tokens) + demand.output_tokens + plan.page_tokens)
    if l1_tokens < needed:
        raise BenchError(
            f"L1 has {l1_tokens:,} tokens, and {demand.concurrency} requests at once need {needed:,}: "
            f"say --option l1_tokens={needed}"
        )


def allowed(arm: str, installed: Iterable[str]) -> str:
    """SGLang's list of plugins for a server: all that are installed, and Toolgap in its own arm only."""
    names = sorted(name for name in set(installed) if name != PLUGIN_NAME)
    if arm == TOOLGAP:
        names.append(PLUGIN_NAME)
    # To SGLang an empty list is no list.
    return ",".join(names) or "none"


def of_arm(setup: Setup, arm: str) -> tuple[Setup, str]:
    """How to start an arm's server, and the plugins that it may load."""
    names = allowed(arm, (entry.name for entry in entry_points(group=PLUGIN_GROUP)))
    environment = {**setup.environment, ALLOW_LIST: names}
    log = setup.log.with_name(f"{setup.log.stem}-{arm}{setup.log.suffix}")
    return replace(setup, environment=environment, log=log), names


def burst(stage: Stage, cell: Cell, name: str) -> Burst:
    """Serve prompts that nobody has asked for before; leaves the caches empty."""
    demand = Demand.of(stage.plan)
    prompts = [
        # Not the arm: both servers get the same prompts.
        prompt_ids(
            stage.plan.seed,
            f"overhead/{cell.prompt_tokens}/{name}/{number}",
            cell.prompt_tokens,
            VOCABULARY,
        )
        for number in range(demand.requests)
    ]
    found = closed_loop(
        lambda ids: stage.engine.generate(ids, max_new_tokens=demand.output_tokens),
        prompts,
        demand.concurrency,
    )
    stage.settle()
    return found


def play(stage: Stage, cell: Cell, round_number: int, plugins: str) -> Throughput:
    """One burst on one server."""
    demand = Demand.of(stage.plan)
    endpoint = has_endpoint(stage)
    began_ts = time.time()
    found = burst(stage, cell, str(round_number))
    generations = [one.generation for one in found.served]
    trial = Throughput(
        trial_id=cell.trial_id(round_number),
        round=round_number,
        cell=cell,
        began_ts=round(began_ts, 6),
        plugins=plugins,
        endpoint=endpoint,
        concurrency=demand.concurrency,
        planned_requests=demand.requests,
        planned_output_tokens=demand.output_tokens,
        wall_s=round(found.wall_s, 6),
        ttft_ms=[round(generation.ttft_s * 1e3, 3) for generation in generations],
        total_ms=[round(generation.total_s * 1e3, 3) for generation in generations],
        output_tokens=[len(generation.output_ids) for generation in generations],
        cached_tokens=cached_tokens(found.served),
        outputs_sha256=outputs_sha256(found.served),
    )
    trial.invalid = judge(trial)
    return trial


def has_endpoint(stage: Stage) -> bool:
    """Whether a server answers as Toolgap does."""
    try:
        stage.toolgap.overview()
    except ToolgapUnreachable as error:
        if error.status_code is None:
            raise
        return False
    return True
