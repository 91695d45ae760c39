"""``toolgap demo``: starts a real engine, plays the agent's turn, and reports what was seen."""

import platform
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from toolgap.childserver import ChildServer, ServerError, free_port
from toolgap.client import Toolgap, ToolgapError, ToolgapUnreachable, connection
from toolgap.demo import profiles, report
from toolgap.demo.errors import DemoError, DemoUsageError
from toolgap.demo.play import ANSWER_TOKENS, GAP_S, Agent
from toolgap.demo.profiles import Profile, Sizes
from toolgap.demo.progress import Story
from toolgap.demo.scenario import Conversation, fit
from toolgap.demo.tiers import ForeignTiers, OwnTiers, StorageFolder, Tiers
from toolgap.demo.tool import OTHERS, TEST_MODULE, TOOLS, Repository, library_text
from toolgap.demo.trials import ARMS, INVARIANTS, Trial, check, order, summarize
from toolgap.engineclient import Engine, EngineError
from toolgap.signals import Stopped, StopSignals
from toolgap.terminal import Exit

LEAST_PROMPT_TOKENS = 512
LEAST_DISK_BYTES = 4 * 2**30
START_DEADLINE_S = {True: 600.0, False: 3600.0}
"""By whether the server runs on a CPU; on a GPU the model may have to be downloaded."""

LOG, TABLE, RESULTS, ERROR = "server.log", "table.txt", "results.json", "error.txt"
CHARTS = ("chart.png", "chart.svg")
WRITTEN = (LOG, TABLE, RESULTS, ERROR, *CHARTS)

INTRODUCTION = """\
[bold]Toolgap demo[/bold]: an agent calls a tool. Meanwhile other traffic pushes its KV out
of L1 (device) and L2 (host). Its continuation is then served three ways:
  [bold]A[/bold]  recompute           the engine computes the whole prompt again
  [bold]B[/bold]  restore on request  it waits while its KV is read from L3 (storage)
  [bold]C[/bold]  restore ahead       Toolgap has read the KV into L2 while the tool ran
"""

_STARTING = (
    ("Load weight begin", "loading the model"),
    ("Load weight end", "allocating L1"),
    ("hierarchical KV host pool", "allocating L2"),
    ("Attached hybrid pool stack", "attaching L3"),
    ("Application startup complete", "almost there"),
)
"""What SGLang's log says, and what it means."""


def run(
    prompt_tokens: int,
    trials: int,
    output: Path,
    model: str | None = None,
    url: str | None = None,
    cpu: bool | None = None,  # noqa: FBT001 - the command line's own three-way switch
    console: Console | None = None,
) -> int:
    """Run the demo.

    Args:
        prompt_tokens: At least this many tokens of prompt before the tool call.
        trials: How often each arm is played.
        output: Folder for the results, the chart and the server's log.
        model: Path or hub name; None for the profile's own.
        url: A running server with Toolgap; None to start one.
        cpu: Whether to run on the CPU; None to take a GPU if there is one.
        console: Where the story is told; None for stdout.

    Returns:
        The exit status: as of every command, 1 if an invariant did not hold or the demo could not run, 128 + the
        number of the signal that stopped it.
    """
    console = console or Console(highlight=False)
    try:
        with StopSignals() as signals:
            _check_arguments(prompt_tokens, trials)
            console.print(INTRODUCTION)
            demo = _Demo(Story(console), signals, prompt_tokens, trials, _folder(output))
            if url is None:
                return demo.on_own_server(model, cpu=cpu)
            if model is not None or cpu is not None:
                raise DemoUsageError("a running server has its model and its device: leave those options out")
            _check_url(url)
            return demo.on_running_server(url)
    except Stopped as stop:
        console.print(f"Stopped by {stop}; all that the demo had started has ended.")
        return 128 + stop.number
    except (DemoError, EngineError, ServerError, ToolgapError, ToolgapUnreachable, httpx.HTTPError) as error:
        console.print(f"[bold red]The demo cannot go on:[/bold red] {escape(str(error))}", soft_wrap=True)
        return _status(error)
    except Exception as error:  # noqa: BLE001 - a newcomer gets a sentence, and the traceback in a file
        return _unexpected(console, output, error)


def _status(error: Exception) -> Exit:
    match error:
        case DemoUsageError():
            return Exit.USAGE
        case ToolgapError() | ToolgapUnreachable(status_code=401 | 403):
            return Exit.REFUSED
        case ToolgapUnreachable() | httpx.HTTPError():
            return Exit.UNREACHABLE
        case _:
            return Exit.FAILED


def _check_arguments(prompt_tokens: int, trials: int) -> None:
    if prompt_tokens < LEAST_PROMPT_TOKENS:
        raise DemoUsageError(
            f"the prompt must have {LEAST_PROMPT_TOKENS} tokens at least, not {prompt_tokens}"
        )
    if trials < 1:
        raise DemoUsageError(f"at least one trial is needed, not {trials}")


def _check_url(url: str) -> None:
    try:
        connection(url, None)
    except ValueError as error:
        raise DemoUsageError(str(error)) from None


def _folder(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
        # What an earlier demo left there must not pass for the outcome of this one.
        for name in WRITTEN:
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise DemoUsageError(f"cannot write to {output}: {error.strerror}") from error
    return output


def _unexpected(console: Console, output: Path, error: Exception) -> int:
    note = output / ERROR
    try:
        note.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        where = f"the details are in {note}"
    except OSError:
        where = "and its details could not be written"
    text = f"The demo met a fault it does not know ({type(error).__name__}: {error}); {where}."
    console.print(f"[bold red]{escape(text)}[/bold red]", soft_wrap=True)
    return Exit.FAULT


@dataclass(frozen=True)
class _Setting:
    """What the trials run on, in words, for the report."""

    hardware: str
    model: str
    facts: dict[str, Any]


class _Played(NamedTuple):
    """What was seen, for the report."""

    trials: list[Trial]
    title: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class _Demo:
    story: Story
    signals: StopSignals
    prompt_tokens: int
    trials: int
    output: Path
    begin_s: float = field(default_factory=time.monotonic)

    def on_own_server(self, model: str | None, *, cpu: bool | None) -> int:
        """Start a server, play, and end it."""
        profile = self._profile(model, cpu=cpu)
        profiles.check_context(self.prompt_tokens, profiles.context_tokens(profile.model))
        self._check_disk()
        url = f"http://127.0.0.1:{(port := free_port())}"
        arguments = profile.arguments(Sizes(self.prompt_tokens), port)
        with self._storage_folder() as storage:
            server = ChildServer(
                command=profile.command(arguments),
                health_url=f"{url}/health",
                log=self.output / LOG,
                environment=profile.environment(arguments, storage.path),
                grace_s=profile.grace_s,
            )
            with self._running(server, profile):
                try:
                    played = self._on_own(url, server, storage, profile)
                except (httpx.TransportError, ToolgapUnreachable):
                    # If the server has ended, that and its log say more than a broken connection.
                    server.check_running()
                    raise
        return self._report(played)

    def on_running_server(self, url: str) -> int:
        """Play on a server that somebody else started."""
        with Engine(url) as engine, Toolgap(url) as toolgap:
            with self.story.phase(f"looking at {url}") as phase:
                try:
                    status = toolgap.overview().engine
                    context, name = engine.context_tokens(), profiles.model_label(engine.model_name())
                    release = engine.release()
                except httpx.TransportError as error:
                    raise ToolgapUnreachable(f"no answer from {url}: {error}") from error
                phase.result = f"SGLang {release}, {name}"
            profiles.check_context(self.prompt_tokens, context)
            self.story.say("  [yellow]The demo flushes this server's L1 and L2 again and again.[/yellow]")
            setting = _Setting(
                f"server at {httpx.URL(url).host}",
                name,
                {"sglang": release, "url": url, "engine": msgspec.to_builtins(status)},
            )
            played = self._play(engine, toolgap, ForeignTiers(engine), status.page_tokens, setting)
        return self._report(played)

    def _profile(self, model: str | None, *, cpu: bool | None) -> Profile:
        with self.story.phase("choosing where to run", notes=True) as phase:
            profile = profiles.choose(model, phase.note, cpu=cpu)
            where = "no GPU needed" if profile.cpu else "GPU"
            phase.result = f"{profile.hardware} ({where}), {profile.model_label}"
        return profile

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.output).free
        if free < LEAST_DISK_BYTES:
            raise DemoError(
                f"{self.output} has {free / 2**30:.1f} GiB free, and the demo's L3 may take "
                f"{LEAST_DISK_BYTES / 2**30:.0f}: choose another folder with --output"
            )

    @contextmanager
    def _storage_folder(self) -> Iterator[StorageFolder]:
        # In the output folder, because /tmp is often memory, and L3 stands for a disk.
        path = Path(tempfile.mkdtemp(prefix="l3-", dir=self.output.absolute()))
        try:
            yield StorageFolder(path)
        finally:
            with self.signals.hold():
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _running(self, server: ChildServer, profile: Profile) -> Iterator[None]:
        try:
            with self.story.phase("starting stock SGLang") as phase:
                with self.signals.hold():
                    server.start()
                server.wait_until_healthy(
                    START_DEADLINE_S[profile.cpu], lambda log: phase.note(_meaning(log))
                )
                phase.result = f"pid {server.pid}, log in {server.log}"
            yield
        finally:
            with self.signals.hold(), self.story.phase("ending the server") as phase:
                processes = len(server.members())
                server.end()
                phase.result = f"{processes} processes, all gone"

    def _on_own(self, url: str, server: ChildServer, storage: StorageFolder, profile: Profile) -> _Played:
        with Engine(url) as engine, Toolgap(url) as toolgap:
            profiles.check_context(self.prompt_tokens, engine.context_tokens())
            status = toolgap.overview().engine
            tiers = OwnTiers(
                engine,
                storage,
                prompt_tokens=self.prompt_tokens,
                page_tokens=status.page_tokens,
                l2_tokens=status.host_total_tokens,
            )
            setting = _Setting(
                profile.hardware,
                profile.model_label,
                {
                    "sglang": engine.release(),
                    "command": list(server.command),
                    "l1_tokens": Sizes(self.prompt_tokens).l1_tokens,
                    "engine": msgspec.to_builtins(status),
                },
            )
            return self._play(engine, toolgap, tiers, status.page_tokens, setting)

    def _play(
        self, engine: Engine, toolgap: Toolgap, tiers: Tiers, page_tokens: int, setting: _Setting
    ) -> _Played:
        started = datetime.now(UTC)
        with tempfile.TemporaryDirectory(prefix="toolgap-demo-") as folder:
            repository = Repository.create(Path(folder) / "repository")
            conversation, prefix_ids = self._agent_turn(engine, repository)
            if isinstance(tiers, OwnTiers):
                self._fill(engine, tiers, prefix_ids)
            else:
                with self.story.phase("warming up"):
                    tiers.evicted(prefix_ids)
            agent = Agent(engine, toolgap, tiers, repository, conversation, prefix_ids, page_tokens)
            tool_output = repository.run_tests(TEST_MODULE)
            trials = self._trials(agent)
        facts = {
            "toolgap": _version("toolgap"),
            "python": platform.python_version(),
            "played": started.isoformat(timespec="seconds"),
            "hardware": setting.hardware,
            "model": setting.model,
            **setting.facts,
            "prefix_tokens": len(prefix_ids),
            "continuation_tokens": trials[0].generation.prompt_tokens,
            "answer_tokens": ANSWER_TOKENS,
            "gap_s": GAP_S,
            "tools": "by the chat template"
            if conversation.native_tools
            else "described in the system message",
            "scripted": "the assistant's tool calls; the answer is the model's own",
            "evicted_by": tiers.how_evicted,
            "tool_output": tool_output,
            "answer": trials[0].generation.text,
            "messages": conversation.continued(tool_output),
            "tool_definitions": TOOLS,
        }
        title = (
            f"{setting.model} on stock SGLang {setting.facts['sglang']}\n{setting.hardware}\n"
            f"{len(prefix_ids):,} tokens before the tool call, {trials[0].generation.prompt_tokens:,} after it"
        )
        return _Played(trials, title, facts)

    def _agent_turn(self, engine: Engine, repository: Repository) -> tuple[Conversation, list[int]]:
        with self.story.phase("the agent reads a repository") as phase:
            bare = [{"role": "user", "content": "hello"}]
            native_tools = engine.tokenize_chat(bare, TOOLS, answer=False) != engine.tokenize_chat(
                bare, None, answer=False
            )

            def tokenize(conversation: Conversation) -> list[int]:
                return engine.tokenize_chat(conversation.messages, conversation.tools, answer=False)

            conversation = fit(
                self.prompt_tokens,
                repository.files(),
                repository.read_file,
                lambda candidate: len(tokenize(candidate)),
                native_tools=native_tools,
            )
            prefix_ids = tokenize(conversation)
            calls = ", ".join(f"{read.lines} lines of {read.path}" for read in conversation.reads)
            phase.result = f"{calls}: {len(prefix_ids):,} tokens through the model's chat template"
        if not native_tools:
            note = "The model's chat template knows no tools, so its system message describes them."
            self.story.say(f"  [dim]{note}[/dim]")
        note = (
            "The agent's calls are scripted, as a small model does not make them reliably; all else is real."
        )
        self.story.say(f"  [dim]{note}[/dim]")
        return conversation, prefix_ids

    def _fill(self, engine: Engine, tiers: OwnTiers, prefix_ids: Sequence[int]) -> None:
        with self.story.phase(
            "the model computes the prompt once; SGLang keeps its KV in L1, L2 and L3"
        ) as phase:
            generation = tiers.store(prefix_ids)
            phase.result = f"first token after {report.seconds(generation.ttft_s)}"
        with self.story.phase("other agents' prompts, to overflow L1 and L2 with") as phase:
            # A token is about four characters of source, and too few tokens would only be repeated.
            text_ids = engine.tokenize_text(library_text(OTHERS)[: 8 * tiers.traffic_tokens])
            tiers.prepare(text_ids, lambda done, total: phase.note(f"{done} of {total} computed"))
            phase.result = tiers.how_evicted

    def _trials(self, agent: Agent) -> list[Trial]:
        trials: list[Trial] = []
        for number in range(1, self.trials + 1):
            for arm in order(number):
                with self.story.phase(f"trial {number}, {arm} {ARMS[arm]}") as phase:
                    trial = agent.trial(number, arm, phase.note)
                    trials.append(trial)
                    phase.result = _seen(trial)
        return trials

    def _report(self, played: _Played) -> int:
        trials, title, facts = played
        failures, summaries = check(trials), summarize(trials)
        seen = report.sentence(summaries)
        text, results = self.output / TABLE, self.output / RESULTS
        charts = [self.output / name for name in CHARTS]
        text.write_text(f"{report.table_text(summaries, title)}\n{seen}\n", encoding="utf-8")
        report.write_results(results, {**facts, "seen": seen}, trials, summaries, failures)
        charted = report.write_chart(summaries, trials, title, charts)
        console, say = self.story.console, self.story.say
        console.print()
        console.print(report.table(summaries, title))
        console.print()
        console.print(f"[dim]{report.LEGEND}[/dim]")
        console.print()
        console.print(escape(seen))
        console.print()
        answer = facts["answer"].strip().partition("\n")[0]
        say(f"[dim]The model's own answer: {escape(answer)}[/dim]")
        files = [text, results, *(charts if charted else [])]
        say(f"[dim]Written: {', '.join(escape(str(path)) for path in files)}[/dim]")
        if not charted:
            say("[dim]No chart: matplotlib is not installed (pip install matplotlib).[/dim]")
        for failure in failures:
            say(f"[bold red]Invariant failed:[/bold red] {escape(str(failure))}")
        if not failures:
            console.print(f"[green]Every invariant held: {', '.join(INVARIANTS)}.[/green]")
        say(f"[dim]The demo took {time.monotonic() - self.begin_s:.0f} s.[/dim]")
        return Exit.FAILED if failures else Exit.OK


def _seen(trial: Trial) -> str:
    answer = trial.generation
    counts = {"L1": answer.device_tokens, "L2": answer.host_tokens, "L3": answer.storage_tokens}
    found = [f"{count:,} tokens from {tier}" for tier, count in counts.items() if count]
    return f"first token after {report.seconds(answer.ttft_s)}, {', '.join(found) or 'nothing cached'}"


def _meaning(log: str) -> str:
    """What a starting server does, by the last thing in its log that means something to a user."""
    positions = [(log.rfind(needle), meaning) for needle, meaning in _STARTING]
    last, meaning = max(positions)
    return meaning if last >= 0 else "importing"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
