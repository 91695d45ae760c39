"""Several tokenizer workers: each HTTP process has the endpoint, asks for the key, and answers for all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from harness import ADMIN_KEY, DEADLINE_S, PAGE, Prompt, Server, until

from toolgap.doctor.answers import ask_server
from toolgap.doctor.findings import Level, has_problem
from toolgap.doctor.server import check_server
from toolgap.protocol import MAX_WAIT_S, PATH, Code, OperationStatus, Reason, State
from toolgap.sglang.internals.targets import SUPPORTED

pytestmark = pytest.mark.engine

PAGES = 20


class Worker:
    """A connection that one of the server's HTTP processes has accepted."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(
            base_url=url,
            timeout=DEADLINE_S,
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            limits=httpx.Limits(max_connections=1),
        )
        self.pid = self.state()["http_pid"]

    def state(self) -> dict[str, int]:
        state: dict[str, int] = self.http.get("/server_info").json()["internal_states"][0]["toolgap_probe"]
        return state

    def call(self, **body: object) -> OperationStatus:
        """One call of the endpoint; fails unless it answers 200."""
        reply = self.http.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        return msgspec.convert(reply.json(), OperationStatus)


@pytest.fixture(scope="module")
def worker_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        # Two cores start two workers: uvicorn would end those that are slow to answer.
        "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300",
        # A connection stays with the worker that has accepted it.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    }
    with Server(
        model,
        tmp_path_factory.mktemp("workers"),
        arguments=("--tokenizer-worker-num", "2"),
        environment=environment,
    ) as server:
        yield server


@pytest.fixture
def server(worker_server: Server) -> Iterator[Server]:
    """A server with two workers, its cache empty; afterwards everything is back where it was."""
    with worker_server.left_as_found():
        yield worker_server


def both(server: Server) -> Iterator[tuple[Worker, Worker]]:
    """Connections to both workers, the one with the lower process id first."""
    opened: list[Worker] = []

    def another() -> list[Worker] | None:
        opened.append(Worker(server.url))
        distinct = {worker.pid: worker for worker in opened}
        return sorted(distinct.values(), key=lambda worker: worker.pid) if len(distinct) == 2 else None

    first, second = until("two workers have accepted", another)
    yield first, second
    for worker in opened:
        worker.http.close()


@pytest.fixture
def workers(server: Server) -> Iterator[tuple[Worker, Worker]]:
    yield from both(server)


@pytest.fixture
def more(server: Server) -> Iterator[tuple[Worker, Worker]]:
    """Further connections to the same workers, in the same order."""
    yield from both(server)


def test_what_one_worker_restores_all_know_of(
    server: Server, workers: tuple[Worker, Worker], prompt: Prompt
) -> None:
    first, second = workers
    prefix = prompt(PAGES * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        submitted = first.call(action="submit", input_ids=prefix)
        wait_until_held()
        seen = second.call(action="status", operation_id=submitted.operation_id)
        assert (seen.state, seen.submitted_ts) == (State.RESTORING, submitted.submitted_ts)
        following = second.call(action="submit", input_ids=prefix)
        assert following.following
        second.call(action="cancel", operation_id=following.operation_id)
    for worker in workers:
        outcome = worker.call(action="status", operation_id=submitted.operation_id, wait_s=MAX_WAIT_S)
        assert (outcome.state, outcome.read_tokens) == (State.RESTORED, PAGES * PAGE)
    assert first.call(action="status", operation_id=following.operation_id).reason is Reason.REQUESTED
    continuation = server.generate(prefix + [5])
    assert continuation.sources == (0, PAGES * PAGE, 0)
    assert continuation.output_ids == recomputed.output_ids


def test_any_worker_names_prefixes_by_messages_and_by_a_request_of_another(
    server: Server, workers: tuple[Worker, Worker]
) -> None:
    messages = [{"role": "user", "content": "Which files are in this folder? " * 60}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
    for served, asked in (workers, workers[::-1]):
        completion = served.http.post("/v1/chat/completions", json=body).json()
        server.flush()
        by_request = asked.call(action="submit", request_id=completion["id"])
        outcome = asked.call(action="status", operation_id=by_request.operation_id, wait_s=MAX_WAIT_S)
        by_messages = asked.call(action="submit", messages=messages)
        assert (outcome.stable_tokens, outcome.expected_tokens) == (by_messages.requested_tokens, 4)
        assert outcome.inserted_tokens == by_messages.resident_tokens == by_messages.aligned_tokens > 0


def test_a_long_poll_ends_with_an_operation_that_another_worker_submitted(
    server: Server, workers: tuple[Worker, Worker], more: tuple[Worker, Worker], prompt: Prompt
) -> None:
    """The reading client gives up before the poll's time is over: only the operation's end ends it."""
    assert MAX_WAIT_S > DEADLINE_S
    prefix = prompt(PAGES * PAGE)
    server.store(prefix + [5])
    with ThreadPoolExecutor() as pool:
        with server.probe.hold("get") as wait_until_held:
            operation_id = workers[0].call(action="submit", input_ids=prefix).operation_id
            wait_until_held()
            poll = {"action": "status", "operation_id": operation_id, "wait_s": MAX_WAIT_S}
            polls = [pool.submit(worker.call, **poll) for worker in more]
            until("a poll waits at each", lambda: all(worker.state()["waiting_calls"] for worker in workers))
        assert [poll.result().state for poll in polls] == [State.RESTORED] * 2


def test_a_long_poll_whose_time_is_over_answers_with_the_state(
    server: Server, workers: tuple[Worker, Worker], prompt: Prompt
) -> None:
    prefix = prompt(PAGES * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        submitted = workers[0].call(action="submit", input_ids=prefix)
        wait_until_held()
        for worker in workers:
            status = worker.call(action="status", operation_id=submitted.operation_id, wait_s=0.3)
            assert status.state is State.RESTORING
    server.ended(submitted.operation_id)


def test_an_operation_nobody_knows(workers: tuple[Worker, Worker]) -> None:
    for worker in workers:
        reply = worker.http.post(PATH, json={"action": "status", "operation_id": "never", "wait_s": 9})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, Code.UNKNOWN_OPERATION)


def test_every_worker_asks_for_the_admin_key(workers: tuple[Worker, Worker]) -> None:
    """SGLang has no middleware for it in this set-up."""
    for worker in workers:
        for key in ("", "Bearer wrong", f"Basic {ADMIN_KEY}", f"Bearer {ADMIN_KEY}x"):
            reply = worker.http.post(PATH, json={"action": "status"}, headers={"Authorization": key})
            assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
        assert worker.http.post(PATH, json={"action": "status"}).status_code == 200


def test_the_doctor_notes_what_sglang_leaves_open(server: Server) -> None:
    found = check_server(ask_server(server.url, ADMIN_KEY), SUPPORTED)
    assert not has_problem(found), found
    [note] = [finding for finding in found if finding.name == "tokenizer-workers"]
    assert note.level is Level.NOTE
