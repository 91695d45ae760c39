"""What restores do to everybody else: unrelated traffic with and without them, at equal load."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, ClassVar, NamedTuple

import msgspec

from toolgap.bench import charts, tables
from toolgap.bench.evidence import Manifest
from toolgap.bench.load import arrivals, cached_tokens, closed_loop, inter_token_ms, open_loop, outputs_sha256
from toolgap.bench.plan import Cell, Plan, prompt_ids
from toolgap.bench.play import NO_GAP_S
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread, percentile
from toolgap.bench.stage import RESTORE_DEADLINE_S, VOCABULARY, Prompt, Stage, fresh_salt
from toolgap.bench.validity import COUNTERS, PREFETCHED
from toolgap.client import Toolgap, ToolgapError
from toolgap.engineclient import Generation
from toolgap.protocol import Reason

WITHOUT, WITH = "without", "with"

MAX_LATE_MS = 50.0
"""At the median; the client is the bottleneck if requests leave later."""

WARM_UP_REQUESTS = 8
"""Side by side, as many as a burst may bring: kernels are compiled for numbers of requests."""


class Traffic(NamedTuple):
    """The load of a window, from the plan's options."""

    window_s: float
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    operations: int
    """Restores that run at once."""

    @classmethod
    def of(cls, plan: Plan) -> "Traffic":
        """With the defaults for what the plan leaves open."""
        options = plan.options
        return cls(
            window_s=float(options.get("window_s", 15.0)),
            rate_per_s=float(options.get("rate_per_s", 1.0)),
            prompt_tokens=int(options.get("bystander_prompt_tokens", 256)),
            output_tokens=int(options.get("bystander_output_tokens", 32)),
            operations=int(options.get("operations", 1)),
        )


class Restores(msgspec.Struct, kw_only=True):
    """What was restored during a window. Counts are of tokens unless named."""

    states: dict[str, int] = {}
    """Operations that read or tried to, by how they ended."""
    elapsed_ms: list[float] = []
    """Of each of those."""
    read_tokens: int = 0
    resident: int = 0
    """Submits that found their whole prefix resident."""
    refused: dict[str, int] = {}
    """Submits that were refused, by their code; each was tried again."""
    restoring_s: float = 0.0
    """From the first submit to the last outcome."""


class Window(msgspec.Struct, kw_only=True):
    """Unrelated traffic for some seconds. Lists have one item a request unless named otherwise."""

    trial_id: str
    round: int
    cell: Cell
    """Its arm says whether restores ran, its prompt_tokens how long their prompts are."""
    began_ts: float
    page_cache: str
    page_cache_share: float | None
    """Of the restored prompts' files when the window began."""
    window_s: float
    rate_per_s: float
    bystander_prompt_tokens: int
    bystander_output_tokens: int
    planned_requests: int
    due_s: list[float]
    late_ms: list[float]
    ttft_ms: list[float]
    output_tokens: list[int]
    itl_ms: list[float]
    """Inter-token latencies of all requests together."""
    cached_tokens: int
    """Of the bystanders' prompts."""
    outputs_sha256: str
    restored_prompts: int
    """So many are restored in turn: more than L2 holds."""
    restores: Restores
    counters: dict[str, float]
    """Changes of the engine's own, over the window."""
    invalid: list[str] = []


def judge(trial: Window) -> list[str]:
    """The rules that did not hold."""
    found = []
    served = len(trial.ttft_ms)
    if not served or served != trial.planned_requests:
        found.append(f"served: {served} of {trial.planned_requests} requests")
    if short := [tokens for tokens in trial.output_tokens if tokens != trial.bystander_output_tokens]:
        found.append(
            f"outputs: {len(short)} requests generated not {trial.bystander_output_tokens} tokens but {short[0]}"
        )
    if trial.cached_tokens:
        found.append(f"uncached: {trial.cached_tokens} tokens of bystanders' prompts were cached")
    if trial.late_ms and (late_ms := median(trial.late_ms)) >= MAX_LATE_MS:
        found.append(f"late: requests left {late_ms:g} ms after they were due, at the median")
    read = trial.counters.get(PREFETCHED)
    if trial.cell.arm == WITHOUT and (read or trial.restores.states):
        found.append(f"alone: {read} tokens were read from storage")
    if trial.cell.arm == WITH:
        if not trial.restores.states or not trial.restores.read_tokens:
            found.append(f"restores: none read anything; they ended as {trial.restores.states}")
        if read != trial.restores.read_tokens:
            found.append(f"reads: the engine counted {read} and not {trial.restores.read_tokens}")
    return found


RULES = (
    "every planned request was served and generated exactly the planned tokens; nothing of a bystander's prompt "
    f"was cached; requests left less than {MAX_LATE_MS:g} ms after they were due, at the median; without "
    "restores nothing was read from storage; with restores at least one ended and read, and SGLang's counter "
    "of tokens read from storage grew by exactly what the operations report"
)


class Bystanders(Recipe[Window]):
    """Windows of equal traffic, in which restores run all the time or not at all."""

    name = "bystanders"
    says = "TTFT and inter-token latency of unrelated traffic, with and without restores running"
    trial_type = Window
    defaults: ClassVar[dict[str, Any]] = {
        "prompt_tokens": (4096,),
        "gaps_ms": (0.0,),
        "arms": (WITHOUT, WITH),
    }

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        if not set(self.planned(plan)) - done:
            return
        prompts = {tokens: _store(stage, tokens, say) for tokens in plan.prompt_tokens}
        say("warming up")
        warm_up(stage, next(iter(prompts.values()))[0])
        for trial_id, cell, number in self.left(plan, done):
            yield Step(
                trial_id,
                lambda cell=cell, number=number: play(  # type: ignore[misc]
                    stage, cell, number, prompts[cell.prompt_tokens]
                ),
            )

    def ttft_ms(self, trial: Window) -> Sequence[float]:
        """See :class:`~toolgap.bench.recipe.Recipe`: those of all its requests."""
        return trial.ttft_ms

    def label(self, cell: Cell) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return f"bystander {cell.arm} restores"

    def judge(self, trial: Window) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return judge(trial)

    def report(self, manifest: Manifest, trials: Sequence[Window]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        traffic = Traffic.of(manifest.plan)
        parts = [
            f"Bystanders: {traffic.prompt_tokens:,} prompt tokens and {traffic.output_tokens} generated tokens "
            f"each, arriving as a Poisson process of {traffic.rate_per_s:g} a second in windows of "
            f"{traffic.window_s:g} s. Both windows of a round have the same arrivals and prompts. *With* keeps "
            f"{'one restore' if traffic.operations == 1 else f'{traffic.operations} restores'} running all the time."
        ]
        for tokens in manifest.plan.prompt_tokens:
            valid = [t for t in trials if t.cell.prompt_tokens == tokens and not t.invalid]
            if valid:
                parts += [
                    f"## Restores of {tokens:,} prompt tokens",
                    _pooled(valid),
                    _by_round(valid),
                    _restores(valid),
                ]
        parts += ["## Validity", f"A window counts only if {RULES}."]
        return "\n\n".join(parts)

    def charts(self, manifest: Manifest, trials: Sequence[Window]) -> dict[str, Any]:
        """See :class:`~toolgap.bench.recipe.Recipe`: the whole distributions."""
        drawn: dict[str, Any] = {}
        for tokens in manifest.plan.prompt_tokens:
            valid = [t for t in trials if t.cell.prompt_tokens == tokens and not t.invalid]
            title = f"{manifest.model}, {tables.hardware(manifest)}: bystanders of {tokens:,}-token restores"
            for name, label in (("ttft", "time to first token, ms"), ("itl", "inter-token latency, ms")):
                series = {f"{arm} restores": METRICS[name](valid, arm) for arm in (WITHOUT, WITH)}
                drawn[f"bystanders-{name}-{tokens}"] = charts.distributions(title, label, series)
        return drawn


def _ttft_ms(trials: Sequence[Window], arm: str) -> list[float]:
    return [value for trial in trials if trial.cell.arm == arm for value in trial.ttft_ms]


def _itl_ms(trials: Sequence[Window], arm: str) -> list[float]:
    return [value for trial in trials if trial.cell.arm == arm for value in trial.itl_ms]


METRICS: dict[str, Callable[[Sequence[Window], str], list[float]]] = {"ttft": _ttft_ms, "itl": _itl_ms}

QUANTILES: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": median,
    "p99": lambda values: percentile(values, 99),
}


def _columns() -> list[str]:
    return [f"{name.upper()} {quantile}" for name in METRICS for quantile in QUANTILES]


def _figures(trials: Sequence[Window], arm: str) -> list[float | None]:
    """In the order of :func:`_columns`; None where there are no values."""
    return [
        quantile(values) if (values := metric(trials, arm)) else None
        for metric in METRICS.values()
        for quantile in QUANTILES.values()
    ]


def _ratios(trials: Sequence[Window]) -> list[float | None]:
    """With over without."""
    return [
        over / under if over and under else None
        for over, under in zip(_figures(trials, WITH), _figures(trials, WITHOUT), strict=True)
    ]


def _pooled(trials: Sequence[Window]) -> str:
    rows = []
    for arm in (WITHOUT, WITH):
        own = [trial for trial in trials if trial.cell.arm == arm]
        figures = ["-" if value is None else tables.number(value) for value in _figures(own, arm)]
        rows.append([f"{arm} restores", str(len(own)), str(len(_ttft_ms(own, arm))), *figures])
    ratios = ["-" if value is None else f"{value:.3f}" for value in _ratios(trials)]
    rows.append(["with / without", "", "", *ratios])
    table = tables.table(["ms", "windows", "requests", *_columns()], rows)
    return (
        "Over all requests of the valid windows. p99 is the nearest rank: of fewer than 100 values it is the "
        f"largest.\n\n{table}"
    )


def _by_round(trials: Sequence[Window]) -> str:
    """Ratios of each round whose windows are both valid: they had the same arrivals."""
    pairs = []
    for number in sorted({trial.round for trial in trials}):
        own = [trial for trial in trials if trial.round == number]
        if {trial.cell.arm for trial in own} == {WITHOUT, WITH}:
            pairs.append((number, own))
    if not pairs:
        return "No round has two valid windows."
    ratios = [_ratios(own) for _, own in pairs]
    rows = [
        [str(number), *("-" if value is None else f"{value:.3f}" for value in row)]
        for (number, _), row in zip(pairs, ratios, strict=True)
    ]
    spreads = [
        Spread.of(value for value in column if value is not None) for column in zip(*ratios, strict=True)
    ]
    rows.append(
        [
            "median [least, most]",
            *("-" if s is None else f"{s.p50:.3f} [{s.low:.3f}, {s.high:.3f}]" for s in spreads),
        ]
    )
    same = sum(len({trial.outputs_sha256 for trial in own}) == 1 for _, own in pairs)
    return (
        "With / without, round by round.\n\n"
        + tables.table(["round", *_columns()], rows)
        + f"\n\nBystanders' output ids were identical in both windows of {same} of {len(pairs)} rounds."
    )


def _restores(trials: Sequence[Window]) -> str:
    own = [trial.restores for trial in trials if trial.cell.arm == WITH]
    if not own:
        return ""
    states: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for restores in own:
        states.update(restores.states)
        refused.update(restores.refused)
    read_tokens = sum(restores.read_tokens for restores in own)
    restoring_s = sum(restores.restoring_s for restores in own)
    took = Spread.of(value for restores in own for value in restores.elapsed_ms)
    return (
        f"Restores: {sum(states.values())} ({tables.counted(states)}), each in {tables.spread(took)} ms; they read "
        f"{read_tokens:,} tokens, {tables.number(read_tokens / restoring_s) if restoring_s else '-'} a second. "
        f"{sum(restores.resident for restores in own)} submits found their prefix resident; refused and tried "
        f"again: {tables.counted(refused) or 'none'}."
    )


def _store(stage: Stage, tokens: int, say: Callable[[str], None]) -> list[Prompt]:
    """As many prompts as it takes for each to have left L2 when its turn comes again."""
    l2_tokens = stage.toolgap.overview().engine.host_total_tokens
    least = l2_tokens // tokens + 1 + Traffic.of(stage.plan).operations
    count = int(stage.plan.options.get("restored_prompts", least))
    prompts = []
    for number in range(count):
        say(f"storing prompt {number + 1} of {count} with {tokens:,} tokens")
        prompts.append(stage.stored(f"bystanders/{tokens}/{number}", tokens))
    return prompts


def warm_up(stage: Stage, prompt: Prompt) -> None:
    """Serve bystanders side by side and restore once, for what is compiled or allocated on first use."""
    traffic = Traffic.of(stage.plan)
    prompts = [
        prompt_ids(stage.plan.seed, f"bystanders/warm-up/{number}", traffic.prompt_tokens, VOCABULARY)
        for number in range(WARM_UP_REQUESTS)
    ]
    closed_loop(
        lambda ids: stage.engine.generate(ids, max_new_tokens=traffic.output_tokens), prompts, len(prompts)
    )
    stage.restored(prompt.prefix_ids)
    stage.settle()


class Restorer:
    """Keeps restores running, each in a thread, until it is left; prefixes take turns.

    Contract: when the context is left nothing of it is in flight, and what failed in it is raised.
    """

    def __init__(self, toolgap: Toolgap, prefixes: Sequence[Sequence[int]], operations: int = 1) -> None:
        self.restores = Restores()
        self._toolgap = toolgap
        self._turns = itertools.cycle(prefixes)
        self._stop = threading.Event()
        self._note = threading.Lock()
        self._error: Exception | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(operations)]
        self._begin_s = 0.0

    def __enter__(self) -> "Restorer":
        self._begin_s = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.restores.restoring_s = round(time.perf_counter() - self._begin_s, 6)
        if self._error is not None and error is None:
            raise self._error

    @property
    def running(self) -> bool:
        """Whether it has neither been left nor failed."""
        return any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        prefix_ids = None
        try:
            while not self._stop.is_set():
                if prefix_ids is None:
                    with self._note:
                        prefix_ids = next(self._turns)
                if self._restore(prefix_ids):
                    prefix_ids = None
        except Exception as error:  # noqa: BLE001 - raised again by __exit__
            self._error = error
            self._stop.set()

    def _restore(self, prefix_ids: Sequence[int]) -> bool:
        """One submit to its end; whether it was taken."""
        restores = self.restores
        try:
            # No continuation comes: none of them is to hold host memory for one against the next.
            operation = self._toolgap.submit(
                input_ids=prefix_ids, expected_gap_s=NO_GAP_S, force=True, retry_for_s=0
            )
        except ToolgapError as refusal:
            if refusal.error.retry_after_s is None:
                raise
            with self._note:
                code = str(refusal.error.code)
                restores.refused[code] = restores.refused.get(code, 0) + 1
            self._stop.wait(refusal.error.retry_after_s)
            return False
        if operation.reason is Reason.ALREADY_RESIDENT:
            with self._note:
                restores.resident += 1
            return True
        operation = self._toolgap.wait(operation.operation_id, RESTORE_DEADLINE_S)
        with self._note:
            restores.states[str(operation.state)] = restores.states.get(str(operation.state), 0) + 1
            restores.elapsed_ms.append(round(operation.elapsed_s * 1e3, 3))
            restores.read_tokens += operation.read_tokens
        return True


def play(stage: Stage, cell: Cell, round_number: int, prompts: Sequence[Prompt]) -> Window:
    """One window of traffic, with or without restores beside it."""
    plan, traffic = stage.plan, Traffic.of(stage.plan)
    requests = arrivals(
        plan.seed,
        # Not the arm: both of a round get the same traffic.
        f"bystanders/{cell.prompt_tokens}/{round_number}",
        rate_per_s=traffic.rate_per_s,
        window_s=traffic.window_s,
        prompt_tokens=traffic.prompt_tokens,
        vocabulary=VOCABULARY,
    )
    stage.settle()
    page_cache_share = stage.prepare_page_cache(path for prompt in prompts for path in prompt.pages)
    salt = fresh_salt()
    counters, began_ts = stage.counters(COUNTERS), time.time()
    restorer = Restorer(stage.toolgap, [prompt.prefix_ids for prompt in prompts], traffic.operations)

    def send(input_ids: Sequence[int]) -> Generation:
        return stage.engine.generate(input_ids, max_new_tokens=traffic.output_tokens, cache_salt=salt)

    with restorer if cell.arm == WITH else nullcontext():
        served = open_loop(send, requests)
    restores = restorer.restores
    after = stage.settled_counters(COUNTERS, PREFETCHED, counters[PREFETCHED] + restores.read_tokens)
    stage.settle()
    generations = [one.generation for one in served]
    trial = Window(
        trial_id=cell.trial_id(round_number),
        round=round_number,
        cell=cell,
        began_ts=round(began_ts, 6),
        page_cache=plan.page_cache,
        page_cache_share=page_cache_share,
        window_s=traffic.window_s,
        rate_per_s=traffic.rate_per_s,
        bystander_prompt_tokens=traffic.prompt_tokens,
        bystander_output_tokens=traffic.output_tokens,
        planned_requests=len(requests),
        due_s=[round(one.due_s, 6) for one in served],
        late_ms=[round(one.late_ms, 3) for one in served],
        ttft_ms=[round(generation.ttft_s * 1e3, 3) for generation in generations],
        output_tokens=[len(generation.output_ids) for generation in generations],
        itl_ms=[round(value, 3) for one in generations for value in inter_token_ms(one.chunks)],
        cached_tokens=cached_tokens(served),
        outputs_sha256=outputs_sha256(served),
        restored_prompts=len(prompts),
        restores=restores,
        counters={name: round(after[name] - counters[name], 6) for name in COUNTERS},
    )
    trial.invalid = judge(trial)
    return trial
