"""Two real workers behind a real gateway, real clients, an agent with a real tool."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateways import WORKER_ARGUMENTS, Agent, AnthropicAgent, Gateway, OpenAIAgent, backed_up, gateway
from harness import ADMIN_KEY, PAGE, PATIENT, Server, until

from toolgap.bench.evidence import TRIALS
from toolgap.bench.verify import problems
from toolgap.protocol import OperationStatus, State

pytestmark = pytest.mark.engine

TEMPLATE = Path(__file__).parent.parent / "templates" / "qwen3.jinja"

Make = Callable[..., Agent]


@pytest.fixture(scope="module")
def workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two workers with one L3, as they have behind a shared file system."""
    folder = tmp_path_factory.mktemp("workers")
    storage = folder / "l3"
    arguments = [*WORKER_ARGUMENTS, "--chat-template", str(TEMPLATE)]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                Server(model, folder / name, arguments=arguments, environment=PATIENT, shared_storage=storage)
            )
            for name in ("a", "b")
        )
        yield first, second


@pytest.fixture(scope="module")
def shared_gateway(
    workers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), [worker.url for worker in workers]) as running:
        yield running


@pytest.fixture(params=[OpenAIAgent, AnthropicAgent])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def operations(worker: Server) -> dict[str, OperationStatus]:
    overview = worker.toolgap.overview()
    return {status.operation_id: status for status in (*overview.active, *overview.recent)}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_continuation_is_answered_from_what_was_restored_while_its_tool_ran(
    workers: tuple[Server, Server], shared_gateway: Gateway, make: Make, streamed: bool
) -> None:
    for worker in workers:
        worker.flush()
        worker.probe.reset()
    before = {name for worker in workers for name in operations(worker)}
    used_before = shared_gateway.metric("used_tokens_total")

    def meanwhile(calls: list[str]) -> None:
        for worker in workers:
            backed_up(worker)
        for call in calls:
            assert shared_gateway.hint(tool_call_id=call, ended=True).status_code == 200
        until("it is restored", lambda: restored(workers, before))

    agent = make(shared_gateway.url, f"restored {streamed}", streamed=streamed)
    agent.turn(meanwhile)
    reads_before = [sum(worker.probe.reads.values()) for worker in workers]
    agent.ask("auto")
    reads_after = [sum(worker.probe.reads.values()) for worker in workers]
    assert reads_after == reads_before, "the continuation read from storage itself"

    [(_, outcome)] = restored(workers, before)
    assert outcome.state in (State.RESTORED, State.PARTIAL)
    shared_gateway.until_metric("used_tokens_total", used_before + certain(outcome))
    until("the page says the same", lambda: page_agrees(shared_gateway))

    # The same conversation, asked of a worker that has nothing of it.
    messages = agent.messages[:-1]
    for worker in workers:
        worker.flush()
    direct = make(workers[0].url, f"restored {streamed}", streamed=streamed)
    direct.messages = messages
    direct.ask("auto")
    assert direct.text == agent.text


def page_agrees(shared_gateway: Gateway) -> bool:
    """Whether the live page's sums are those of the metrics, and of what was used some time was saved."""
    sums = shared_gateway.http.get("/toolgap/state").json()["figures"]
    metrics = {
        "gaps": "turns_total",
        "restores": "restores_submitted_total",
        "refused": "restores_refused_total",
        "landed_tokens": "restored_tokens_total",
        "used_tokens": "used_tokens_total",
    }
    same = all(sums[name] == shared_gateway.metric(metric) for name, metric in metrics.items())
    return same and sums["saved_s"] > 0 and not sums["unestimated"]


def certain(outcome: OperationStatus) -> int:
    """What the continuation must use of it: the prompt's whole pages. Its answer it may write otherwise."""
    assert outcome.stable_tokens
    pages = (outcome.stable_tokens - 1) // PAGE
    assert pages > 20
    return pages * PAGE


def restored(workers: tuple[Server, Server], before: set[str]) -> list[tuple[Server, OperationStatus]]:
    return [
        (worker, status)
        for worker in workers
        for name, status in operations(worker).items()
        if name not in before and status.state.terminal and status.inserted_tokens
    ]


def serving(workers: tuple[Server, Server], before: set[str]) -> Server:
    """The worker that was asked to restore since."""

    def asked() -> list[Server]:
        return [worker for worker in workers if operations(worker).keys() - before]

    [worker] = until("a worker is asked to restore", asked)
    return worker


def test_an_early_continuation_joins_and_no_page_is_read_twice(
    workers: tuple[Server, Server], shared_gateway: Gateway
) -> None:
    for worker in workers:
        worker.flush()
        worker.probe.reset()
    before = {name for worker in workers for name in operations(worker)}
    agent = OpenAIAgent(shared_gateway.url, "joined", streamed=True)
    with ThreadPoolExecutor() as pool, ExitStack() as held:
        waits = [held.enter_context(worker.probe.hold("get")) for worker in workers]

        def meanwhile(calls: list[str]) -> None:
            for worker in workers:
                backed_up(worker)
            [call] = calls
            assert shared_gateway.hint(tool_call_id=call, ended=True).status_code == 200
            until("a read is held", lambda: any(sum(w.probe.calls.values()) for w in workers))

        agent.turn(meanwhile)
        waits[workers.index(serving(workers, before))]()
        continuation = pool.submit(agent.ask, "auto")
        worker = serving(workers, before)
        until("it has joined", lambda: worker.toolgap.overview().engine.waiting_joins == 1)
        held.close()
        continuation.result()
    assert set(worker.probe.reads.values()) == {1}
    [(_, outcome)] = restored(workers, before)
    assert outcome.joined_requests == 1
    assert outcome.used_tokens >= certain(outcome)


def test_a_conversation_that_moves_on_has_its_restore_stopped(
    workers: tuple[Server, Server], shared_gateway: Gateway
) -> None:
    for worker in workers:
        worker.flush()
        worker.probe.reset()
    headers = {"x-session-id": "moves on"}
    agent = OpenAIAgent(shared_gateway.url, "moves on", headers=headers)
    with ExitStack() as held:
        for worker in workers:
            held.enter_context(worker.probe.hold("get"))

        def meanwhile(calls: list[str]) -> None:
            for worker in workers:
                backed_up(worker)
            assert shared_gateway.hint(tool_call_id=calls[0], ended=True).status_code == 200
            until("it is submitted", lambda: active(workers))

        agent.turn(meanwhile)
        [worker] = [worker for worker in workers if worker.toolgap.overview().active]
        [operation] = [status.operation_id for status in active(workers)]
        assert shared_gateway.hint(session_ended="moves on").status_code == 200
        until("it stops", lambda: operations(worker)[operation].stopping)
    assert worker.ended(operation).state is State.CANCELLED


def active(workers: tuple[Server, Server]) -> list[OperationStatus]:
    return [status for worker in workers for status in worker.toolgap.overview().active]


def test_the_benchmark_plays_an_agents_turns_with_restores_and_without(
    workers: tuple[Server, Server], tmp_path: Path
) -> None:
    worker, folder = workers[0], tmp_path / "turns"
    command = [sys.executable, "-m", "toolgap", "bench", "run", "--recipe", "gateway", "-o", str(folder)]
    command += ["--url", worker.url, "--api-key", ADMIN_KEY, "--storage-dir", str(worker.storage)]
    command += ["--page-cache", "warm", "--page-tokens", str(PAGE), "--prompt-tokens", "1024"]
    done = subprocess.run(
        [*command, "--gap-ms", "0", "--gap-ms", "3000", "--trials", "1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    turns = [json.loads(line) for line in (folder / TRIALS).read_bytes().splitlines()]
    assert len(turns) == 4
    assert [turn["invalid"] for turn in turns if turn["invalid"]] == []
    assert problems(folder) == []


def test_a_conversation_of_a_worker_that_dies_is_restored_at_the_other(
    model: Path, workers: tuple[Server, Server], shared_gateway: Gateway
) -> None:
    """Last in this module: it costs a worker."""
    for worker in workers:
        worker.flush()
        worker.probe.reset()
    agent = OpenAIAgent(shared_gateway.url, "fails over", streamed=True)
    before = {name for worker in workers for name in operations(worker)}
    left: list[Server] = []

    def meanwhile(calls: list[str]) -> None:
        for worker in workers:
            backed_up(worker)
        dying = serving(workers, before)
        [other] = [worker for worker in workers if worker is not dying]
        dying.kill()
        left.append(other)

        def landed() -> list[OperationStatus]:
            found = operations(other)
            return [
                found[name]
                for name in found.keys() - before
                if found[name].inserted_tokens and found[name].reason
            ]

        until("it is restored at the other worker", landed)

    agent.turn(meanwhile)
    [other] = left
    reads = sum(other.probe.reads.values())
    agent.ask("auto")
    assert sum(other.probe.reads.values()) == reads
    [status] = [status for name, status in operations(other).items() if name not in before]
    assert status.used_tokens >= certain(status)
