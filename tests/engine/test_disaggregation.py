"""A prefill server restores and joins; a decode server refuses by name.

KV leaves the prefill server by SGLang's own fake transfer: the queues, the prefill loop and the cache are
those of any prefill server, and no decode server has to run.
"""

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import ADMIN_KEY, PAGE, Answer, Prompt, Server, until

from toolgap.childserver import free_port
from toolgap.doctor.answers import ask_server
from toolgap.doctor.findings import Level
from toolgap.doctor.server import check_server
from toolgap.protocol import Code, Reason, State
from toolgap.sglang.internals.targets import SUPPORTED

pytestmark = pytest.mark.engine

PAGES = 20
_rooms = itertools.count(1)


def half(mode: str) -> tuple[str, ...]:
    return (
        *("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "nixl"),
        *("--disaggregation-bootstrap-port", str(free_port())),
        # Requests wait for their own reads until the test lets these go, not for a second.
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )


class PrefillServer(Server):
    """A server whose requests wait for a decode server before they are scheduled, if the test says so."""

    @property
    def _no_decode_server(self) -> Path:
        return self.folder / "no-decode-server"

    def start(self) -> "PrefillServer":
        self.environment["TOOLGAP_PROBE_TRANSFER"] = str(self._no_decode_server)
        super().start()
        return self

    @contextlib.contextmanager
    def without_decode_server(self) -> Iterator[None]:
        """While open, requests stay in the bootstrap queue."""
        self._no_decode_server.touch()
        try:
            yield
        finally:
            self._no_decode_server.unlink()

    def prefill(self, input_ids: list[int]) -> Answer:
        """What a router sends to a prefill server; its answer is the first token."""
        return self.generate(input_ids, tokens=1, bootstrap_host="127.0.0.1", bootstrap_room=next(_rooms))

    def store_prefix(self, input_ids: list[int]) -> Answer:
        """Bring a prompt's KV into L3, and into L3 only."""
        answer = self.prefill(input_ids)
        self.flush()
        self.probe.reset()
        return answer


@pytest.fixture(scope="module")
def prefill_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillServer]:
    environment = {"TOOLGAP_JOIN_TIMEOUT_S": "600"}
    with PrefillServer(
        model, tmp_path_factory.mktemp("prefill"), arguments=half("prefill"), environment=environment
    ) as server:
        yield server


@pytest.fixture
def server(prefill_server: PrefillServer) -> Iterator[PrefillServer]:
    """A prefill server with an empty cache; afterwards everything is back where it was."""
    with prefill_server.left_as_found():
        yield prefill_server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def test_a_prefill_uses_what_was_restored(server: PrefillServer, prompt: Prompt) -> None:
    prefix = prompt(PAGES * PAGE)
    recomputed = server.store_prefix(prefix + [5])
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    assert outcome.read_tokens == PAGES * PAGE
    answer = server.prefill(prefix + [5])
    assert answer.sources == (0, PAGES * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    assert set(server.probe.reads.values()) == {1}


def test_a_prefill_that_waits_for_its_decode_server_joins_and_then_reads_the_rest(
    server: PrefillServer, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    """The operation ends while the request is in the bootstrap queue."""
    prefix, rest = prompt(PAGES * PAGE), prompt(PAGES * PAGE)
    recomputed = server.store_prefix(prefix + rest + [5])
    with server.without_decode_server():
        with server.probe.hold("get") as wait_until_held:
            operation_id = server.toolgap.submit(input_ids=prefix).operation_id
            wait_until_held()
            request = pool.submit(server.prefill, prefix + rest + [5])
            until("the request joined", lambda: server.toolgap.overview().engine.waiting_joins == 1)
        outcome = server.ended(operation_id)
        assert (outcome.state, outcome.joined_requests) == (State.RESTORED, 1)
        until("the rest is read", lambda: len(server.probe.reads) == 2 * PAGES)
        assert server.state()["bootstrapping"] == 1
    answer = request.result()
    assert answer.sources == (0, PAGES * PAGE, PAGES * PAGE)
    assert answer.output_ids == recomputed.output_ids
    assert len(server.probe.reads) == 2 * PAGES
    assert set(server.probe.reads.values()) == {1}


def test_a_submit_follows_the_read_of_a_prefill_that_waits_for_its_decode_server(
    server: PrefillServer, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(PAGES * PAGE)
    server.store_prefix(prefix + [5])
    with server.without_decode_server():
        with server.probe.hold("get") as wait_until_held:
            request = pool.submit(server.prefill, prefix + [5])
            wait_until_held()
            assert server.state()["bootstrapping"] == 1
            submitted = server.toolgap.submit(input_ids=prefix)
            assert submitted.following
        outcome = server.ended(submitted.operation_id)
        assert (outcome.state, outcome.read_tokens) == (State.RESTORED, 0)
    assert request.result().sources == (0, 0, PAGES * PAGE)
    assert set(server.probe.reads.values()) == {1}


def test_a_prefill_that_is_aborted_in_the_bootstrap_queue_leaves_the_operation_alone(
    server: PrefillServer, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(PAGES * PAGE)
    server.store_prefix(prefix + [5])
    with server.without_decode_server(), server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        request = pool.submit(
            server.http.post,
            "/generate",
            json={
                "rid": "aborted",
                "input_ids": prefix + [5],
                "bootstrap_host": "127.0.0.1",
                "bootstrap_room": next(_rooms),
            },
        )
        until("the request joined", lambda: server.toolgap.overview().engine.waiting_joins == 1)
        assert server.http.post("/abort_request", json={"rid": "aborted"}).status_code == 200
        until("it left", lambda: server.toolgap.overview().engine.waiting_joins == 0)
    assert server.ended(operation_id).state is State.RESTORED
    assert request.result().status_code != 200


def test_a_flush_that_a_waiting_prefill_forbids_does_not_end_an_operation(
    server: PrefillServer, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(PAGES * PAGE)
    server.store_prefix(prefix + [5])
    with server.without_decode_server():
        request = pool.submit(server.prefill, prompt(PAGE))
        until("it waits", lambda: server.state()["bootstrapping"] == 1)
        with server.probe.hold("get") as wait_until_held:
            operation_id = server.toolgap.submit(input_ids=prefix).operation_id
            wait_until_held()
            assert server.http.post("/flush_cache").status_code == 400
        assert server.ended(operation_id).state is State.RESTORED
    assert request.result().sources == (0, 0, 0)


def test_a_decode_server_refuses_by_name(model: Path, tmp_path: Path) -> None:
    arguments = (*half("decode"), "--disaggregation-decode-enable-radix-cache")
    with PrefillServer(model, tmp_path, arguments=arguments) as server:
        for body in ({"action": "submit", "input_ids": [1, 2, 3]}, {"action": "status"}):
            reply = server.call(**body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (501, Code.NOT_SUPPORTED)
            assert "decode half" in reply.json()["error"]["message"]
            assert "prefill server" in reply.json()["error"]["message"]
        found = check_server(ask_server(server.url, ADMIN_KEY), SUPPORTED)
        assert "disaggregation" in {f.name for f in found if f.level is Level.PROBLEM}
