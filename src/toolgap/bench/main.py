"""``toolgap bench run``: plays a recipe's trials, and writes each down as it ends."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from toolgap.bench import machine, report
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import Evidence, Manifest, check_same_run
from toolgap.bench.plan import Plan
from toolgap.bench.recipe import Recipe
from toolgap.bench.server import Setup
from toolgap.bench.stage import Stage
from toolgap.client import Toolgap
from toolgap.engineclient import Engine
from toolgap.signals import StopSignals

CPU_DIFFERENCES = (
    "no GPU: Toolgap's `cpu` profile supplies what stock SGLang's HiCache lacks on a CPU (a stand-in for "
    "sgl_kernel, tensor copies for its transfer kernels, attention that computes only the new tokens)",
)

PLAIN_LINE_EVERY_S = 15.0


@dataclass(frozen=True)
class Target:
    """Where trials are played: on servers of one's own, or on one that somebody else runs."""

    setup: Setup | None
    url: str | None = None
    api_key: str | None = None
    storage: Path | None = None
    """The ``file`` backend's folder of a server at a URL, if it is on this machine."""

    @contextmanager
    def stage(self, plan: Plan, say: Callable[[str], None]) -> Iterator[Stage]:
        """A running server."""
        if self.setup is not None:
            say("starting SGLang")
            with self.setup.running() as stage:
                yield stage
            return
        assert self.url is not None
        with Engine(self.url, self.api_key) as engine, Toolgap(self.url, api_key=self.api_key) as toolgap:
            status = toolgap.overview().engine
            if status.page_tokens != plan.page_tokens:
                raise BenchError(f"the server's pages have {status.page_tokens} tokens: say --page-tokens")
            l1_tokens = engine.l1_tokens()
            backend = status.storage_backend or "file"
            policy = status.prefetch_policy
            stage = Stage(engine, toolgap, plan, l1_tokens, self.storage, backend, policy, uuid4().hex)
            try:
                yield stage
            finally:
                # Somebody else's server is left as it was.
                stage.set_policy(policy)
                stage.clear()


def run(
    recipe: Recipe[Any],
    plan: Plan,
    target: Target,
    folder: Path,
    model: str,
    differences: Sequence[str],
    deadline_s: float | None,
    console: Console,
) -> list[Path]:
    """Play what is not played yet, then write report and charts; the files written.

    Args:
        recipe: What to play.
        plan: How.
        target: Where.
        folder: The run's folder, new or to be gone on with.
        model: The model's name for people.
        differences: What differs from a stock installation, beside what is known here.
        deadline_s: No trial begins after this many seconds; the report then says what was not played.
        console: Where progress goes.

    Raises:
        BenchError: it cannot be played.
    """
    begin_s = time.monotonic()
    if recipe.own_servers and target.setup is None:
        raise BenchError(f"the recipe {recipe.name} starts its own servers: leave --url out")
    recipe.check(plan)
    progress = _Progress(console)
    # Another run's folder is told before a server has been started for nothing.
    check_same_run(folder, _manifest(recipe, plan, target, None, folder, model, differences), ("hardware",))
    opened = nullcontext(None) if recipe.own_servers else target.stage(plan, progress.say)
    with StopSignals(), progress, opened as stage:
        manifest = _manifest(recipe, plan, target, stage, folder, model, differences)
        evidence = Evidence.open(folder, recipe.trial_type, manifest)
        planned = recipe.planned(plan)
        done = {trial.trial_id for trial in evidence.trials}
        progress.total(len(planned), len(done))
        with closing(recipe.steps(plan, stage, target.setup, done, progress.say)) as steps:  # type: ignore[type-var]
            for step in steps:
                if deadline_s is not None and time.monotonic() - begin_s > deadline_s:
                    progress.say("the time is up")
                    break
                progress.say(step.trial_id)
                trial = step.play()
                evidence.append(trial)
                progress.advance(len(trial.invalid) > 0)
    if not evidence.trials:
        raise BenchError("no trial was played: give it more time (--deadline)")
    return report.make(folder)


def _manifest(
    recipe: Recipe[Any],
    plan: Plan,
    target: Target,
    stage: Stage | None,
    folder: Path,
    model: str,
    differences: Sequence[str],
) -> Manifest:
    setup = target.setup
    try:
        changed, touched = machine.changed_files("sglang"), machine.sglang_digests()
    except ValueError as error:
        raise BenchError(f"a run needs SGLang's files, for their digests: {error}") from error
    arguments, environment = setup.published() if setup is not None else ([], {})
    engine: dict[str, Any] = {} if stage is None else msgspec.to_builtins(stage.toolgap.overview().engine)
    cpu = setup is not None and setup.cpu
    engine["device"] = "cpu" if cpu else "cuda"
    known = list(CPU_DIFFERENCES) if cpu else []
    if setup is None:
        known.append("the server was started by somebody else: its flags and environment are not known")
    return Manifest(
        run=folder.resolve().name,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan,
        model=model,
        hardware=machine.hardware(None if stage is None else stage.storage),
        software=machine.software(),
        server_arguments=arguments,
        server_environment=environment,
        engine=engine,
        differences_from_stock=[
            *known,
            *differences,
            f"SGLang's plugins here: {', '.join(machine.plugins())}",
        ],
        sglang_files_changed=changed,
        toolgap_sha256=machine.toolgap_digests(),
        sglang_sha256=touched,
    )


class _Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[invalid]} invalid"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, invalid=0)
        self._said_s = 0.0

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """What is done now."""
        self._bar.update(self._task, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_s > PLAIN_LINE_EVERY_S:
            self._said_s = now
            task = self._bar.tasks[0]
            total = "?" if task.total is None else f"{task.total:g}"
            self._console.print(f"{task.completed:g} of {total}: {text}", markup=False)

    def total(self, total: int, completed: int) -> None:
        """How many trials there are, and how many of them are there already."""
        self._bar.update(self._task, total=total, completed=completed)

    def advance(self, invalid: bool) -> None:  # noqa: FBT001 - one fact about one trial
        """A trial has been played."""
        task = self._bar.tasks[0]
        self._bar.update(self._task, advance=1, invalid=task.fields["invalid"] + invalid)
