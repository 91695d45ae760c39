"""The gateway before and behind SGLang's own router, and what is left when one of a chain is killed."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateways import (
    START_DEADLINE_S,
    WORKER_ARGUMENTS,
    AnthropicAgent,
    Gateway,
    OpenAIAgent,
    backed_up,
    gateway,
    system,
)
from harness import PAGE, PATIENT, Server, until

from toolgap.childserver import ChildServer, free_port
from toolgap.protocol import OperationStatus, Reason, State

pytestmark = pytest.mark.engine

TEMPLATE = Path(__file__).parent.parent / "templates" / "qwen3.jinja"
PATIENT_GATEWAY = ("--session-timeout-s", "60", "--restore-timeout-s", "120")
"""So that a busy machine sends no request elsewhere, and gives no restore up."""
LAUNCH_ROUTER = """
from argparse import ArgumentParser
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = ArgumentParser()
RouterArgs.add_cli_args(parser)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()
"""
"""What ``sglang_router.launch_router`` does, but for its import of the whole of SGLang."""
CHECKS_ASK_NOTHING = ("--check-path", "/model_info")
"""For SGLang's own ``/health`` a worker generates a token."""
FEW_TOKENS = 8
CHAT = "/v1/chat/completions"
REFUSED = 'POST /hicache/prefetch HTTP/1.1" 503'
"""In a worker's log."""


@pytest.fixture(scope="module")
def workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two workers with one L3, as they have behind a shared file system."""
    folder = tmp_path_factory.mktemp("workers")
    arguments = [*WORKER_ARGUMENTS, "--chat-template", str(TEMPLATE)]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                Server(
                    model,
                    folder / name,
                    arguments=arguments,
                    environment=PATIENT,
                    shared_storage=folder / "l3",
                )
            )
            for name in ("a", "b")
        )
        yield first, second


@pytest.fixture
def fresh(workers: tuple[Server, Server]) -> tuple[Server, Server]:
    for worker in workers:
        worker.probe.reset()
        worker.flush()
    return workers


@contextmanager
def router(folder: Path, urls: Sequence[str], policy: str) -> Iterator[str]:
    """SGLang's router before these servers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-c", LAUNCH_ROUTER, "--policy", policy),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--worker-startup-check-interval", "1", "--worker-urls", *urls),
    ]
    with ChildServer(command, f"{url}/readiness", folder / "router.log", grace_s=0.0) as child:
        child.wait_until_healthy(START_DEADLINE_S)

        def has_all() -> bool:
            reply = httpx.get(f"{url}/readiness", trust_env=False)
            return bool(reply.json().get("healthy_workers") == len(urls))

        until("the router knows every server", has_all)
        yield url


def operations(*workers: Server) -> dict[str, OperationStatus]:
    overviews = [worker.toolgap.overview() for worker in workers]
    return {
        status.operation_id: status
        for overview in overviews
        for status in (*overview.active, *overview.recent)
    }


def landed(worker: Server, before: set[str]) -> list[OperationStatus]:
    return [
        status
        for name, status in operations(worker).items()
        if name not in before and status.state.terminal and status.inserted_tokens
    ]


def certain(outcome: OperationStatus) -> int:
    """What the continuation must use of it: the prompt's whole pages. Its answer it may write otherwise."""
    assert outcome.stable_tokens
    pages = (outcome.stable_tokens - 1) // PAGE
    assert pages > 20
    return pages * PAGE


def check_output(worker: Server, agent: OpenAIAgent, name: str) -> None:
    """A worker that has nothing of the conversation must say the same in place of its last answer."""
    worker.flush()
    # In a stream the parser of tool calls may leave other text.
    direct = OpenAIAgent(worker.url, name, streamed=agent.streamed)
    direct.messages = agent.messages[:-1]
    direct.ask("auto", FEW_TOKENS)
    assert direct.text == agent.text, (direct.text, agent.text)


def pause(agents: Sequence[OpenAIAgent]) -> list[str]:
    """Let each agent's answer call a tool; the calls' ids."""
    calls: list[str] = []
    for agent in agents:
        agent.turn(calls.extend)
    return calls


def restore_and_continue(
    workers: Sequence[Server], gateways: Sequence[Gateway], agents: Sequence[OpenAIAgent]
) -> None:
    """A gap for each agent, in which all KV leaves host memory and is restored; what it was good for."""
    before = set(operations(*workers))
    used_before = sum(running.metric("used_tokens_total") for running in gateways)
    calls = pause(agents)
    for worker in workers:
        backed_up(worker)
    for call in calls:
        replies = [running.hint(tool_call_id=call, ended=True).status_code for running in gateways]
        assert sorted(replies) == [200, *[404] * (len(gateways) - 1)], "one gateway has the conversation"

    def all_landed() -> list[OperationStatus]:
        found = [status for worker in workers for status in landed(worker, before)]
        return found if len(found) >= len(agents) else []

    outcomes = until("all are restored", all_landed)
    reads_before = [sum(worker.probe.reads.values()) for worker in workers]
    for agent in agents:
        agent.ask("auto", FEW_TOKENS)
    assert [sum(worker.probe.reads.values()) for worker in workers] == reads_before, (
        "a continuation read from storage itself: it came to a worker that had not restored it"
    )
    least = used_before + sum(map(certain, outcomes))
    until("all is used", lambda: sum(one.metric("used_tokens_total") for one in gateways) >= least)


@pytest.mark.parametrize("policy", ["cache_aware", "manual"])
def test_before_a_router_a_turn_is_restored_at_the_worker_that_served_it(
    fresh: tuple[Server, Server], tmp_path: Path, policy: str
) -> None:
    """The first policy sends a prompt where its beginning was, the other one goes by the gateway's key."""
    known = [part for worker in fresh for part in ("--worker", worker.url)]
    names = [f"{policy} {number}" for number in range(3)]
    with (
        router(tmp_path, [worker.url for worker in fresh], policy) as upstream,
        gateway(tmp_path, [upstream], *known, *PATIENT_GATEWAY) as running,
    ):
        agents = [OpenAIAgent(running.url, name, streamed=name.endswith("1")) for name in names]
        restore_and_continue(fresh, [running], agents)
        # The router has no such route.
        with pytest.raises(Exception, match="404"):
            AnthropicAgent(running.url, policy).ask("auto", FEW_TOKENS)
    for agent, name in zip(agents, names, strict=True):
        check_output(fresh[0], agent, name)


def test_behind_a_router_each_gateway_restores_at_its_worker(
    fresh: tuple[Server, Server], tmp_path: Path
) -> None:
    names = [f"behind {number}" for number in range(3)]
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(gateway(tmp_path / str(number), [worker.url], *PATIENT_GATEWAY))
            for number, worker in enumerate(fresh)
        ]
        url = stack.enter_context(router(tmp_path, [running.url for running in gateways], "cache_aware"))
        agents = [OpenAIAgent(url, name, streamed=name.endswith("1")) for name in names]
        restore_and_continue(fresh, gateways, agents)
        assert httpx.post(f"{url}/toolgap/hints", json={}, trust_env=False).status_code == 404
    for agent, name in zip(agents, names, strict=True):
        check_output(fresh[0], agent, name)


# ---- faults ----


def long_answer(name: str) -> dict[str, Any]:
    """A streamed request that goes on until it is stopped."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": system(name)}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 6000,
        "ignore_eos": True,
    }


def is_idle(worker: Server) -> bool:
    load = worker.load()
    return load["num_running_reqs"] == load["num_waiting_reqs"] == 0


@contextmanager
def under_way(url: str, name: str) -> Iterator[Iterator[str]]:
    """A stream of which the first event has come; yields the others."""
    with (
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http,
        http.stream("POST", CHAT, json=long_answer(name)) as reply,
    ):
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def read_to_the_break(lines: Iterator[str]) -> None:
    seen: list[str] = []
    with pytest.raises(httpx.TransportError):
        seen.extend(lines)
    assert "data: [DONE]" not in seen


@pytest.fixture(scope="module")
def running(workers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    urls = [worker.url for worker in workers]
    with gateway(tmp_path_factory.mktemp("gateway"), urls, *PATIENT_GATEWAY, *CHECKS_ASK_NOTHING) as one:
        yield one


def serving(workers: Sequence[Server]) -> Server:
    """The worker that has a request."""

    def busy() -> list[Server]:
        return [worker for worker in workers if not is_idle(worker)]

    [worker] = until("a worker has a request", busy)
    return worker


def test_a_client_that_leaves_within_a_stream_ends_its_request(
    fresh: tuple[Server, Server], running: Gateway
) -> None:
    before = [worker.baseline() for worker in fresh]
    with under_way(running.url, "leaves"):
        serving(fresh)
    until("the request is ended", lambda: all(is_idle(worker) for worker in fresh))
    running.until_metric("exchanges_total", 1, ending="client_left")
    for worker, baseline in zip(fresh, before, strict=True):
        worker.check_back_at(baseline)


def test_a_flush_within_a_restore(fresh: tuple[Server, Server], running: Gateway) -> None:
    agent = OpenAIAgent(running.url, "flushed", streamed=True)
    with ThreadPoolExecutor() as pool, ExitStack() as held:
        waits = {id(worker): held.enter_context(worker.probe.hold("get")) for worker in fresh}
        [call] = pause([agent])
        for worker in fresh:
            backed_up(worker)
        assert running.hint(tool_call_id=call, ended=True).status_code == 200

        def restoring() -> list[Server]:
            return [worker for worker in fresh if worker.probe.calls["get"]]

        [worker] = until("a page is read", restoring)
        waits[id(worker)]()
        reply = pool.submit(worker.http.post, "/flush_cache")
        until("the flush takes effect", worker.is_busy)
        held.close()
        assert reply.result().status_code == 200
    running.until_metric("restores_total", 1, state=State.CANCELLED.value, reason=Reason.FLUSHED.value)
    agent.ask("auto", FEW_TOKENS)
    check_output(fresh[0], agent, "flushed")


def test_a_pause_of_the_engine_within_a_gap(fresh: tuple[Server, Server], running: Gateway) -> None:
    """What a paused engine refuses is asked again, and lands once it goes on."""
    agent = OpenAIAgent(running.url, "paused", streamed=True)
    before, ended = set(operations(*fresh)), running.metric("restores_total")
    [call] = pause([agent])
    # What was asked for as the answer left must not read while the engine is paused.
    running.until_metric("restores_total", ended + 1)
    for worker in fresh:
        backed_up(worker)
        worker.probe.reset()
        assert worker.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        until("it is paused", lambda one=worker: one.toolgap.overview().engine.paused)  # type: ignore[misc]
    try:
        assert running.hint(tool_call_id=call, ended=True).status_code == 200
        until("a submit is refused", lambda: any(REFUSED in worker.log.read_text() for worker in fresh))
    finally:
        for worker in fresh:
            assert worker.http.post("/continue_generation", json={}).status_code == 200
    until("it is restored", lambda: [status for worker in fresh for status in landed(worker, before)])
    reads = [sum(worker.probe.reads.values()) for worker in fresh]
    agent.ask("auto", FEW_TOKENS)
    assert [sum(worker.probe.reads.values()) for worker in fresh] == reads
    check_output(fresh[0], agent, "paused")


def test_a_gateway_that_is_killed_within_a_stream_leaves_nothing_behind(
    fresh: tuple[Server, Server], tmp_path: Path
) -> None:
    worker, _ = fresh
    before = worker.baseline()
    agent = OpenAIAgent("http://to.be.told", "outlives", streamed=True)
    with gateway(tmp_path, [worker.url], *PATIENT_GATEWAY, *CHECKS_ASK_NOTHING) as killed:
        agent.client.base_url = f"{killed.url}/v1/"
        pause([agent])
        with under_way(killed.url, "is cut off") as lines:
            serving([worker])
            assert killed.child.pid is not None
            os.killpg(killed.child.pid, signal.SIGKILL)
            read_to_the_break(lines)
        killed.child.end()
        until("the request is ended", lambda: is_idle(worker))
        # Whoever starts it again gets a gateway that knows nothing, and needs to know nothing.
        killed.child.start()
        killed.child.wait_until_healthy(START_DEADLINE_S)
        agent.ask("auto", FEW_TOKENS)
    worker.check_back_at(before)
    check_output(worker, agent, "outlives")


def test_a_worker_that_is_killed_within_a_stream(fresh: tuple[Server, Server], running: Gateway) -> None:
    """Last in this module: it costs a worker."""
    with under_way(running.url, "dies") as lines:
        dying = serving(fresh)
        [other] = [worker for worker in fresh if worker is not dying]
        dying.kill()
        read_to_the_break(lines)
    running.until_metric("exchanges_total", 1, ending="upstream_broke")
    before = other.baseline()
    agent = OpenAIAgent(running.url, "goes on")
    pause([agent])
    agent.ask("auto", FEW_TOKENS)
    other.check_back_at(before)
    check_output(other, agent, "goes on")
