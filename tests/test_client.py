"""The client's own handling of the protocol: what it sends, and how it reads each kind of reply."""

import asyncio
import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

import toolgap
from toolgap import calls, client
from toolgap.client import AsyncToolgap, Toolgap, ToolgapError, ToolgapUnreachable
from toolgap.protocol import Code, EngineStatus, Error, ErrorReply, OperationStatus, Overview, State

Handler = Callable[[httpx.Request], httpx.Response]


def operation(state: State = State.QUERYING, **fields: Any) -> OperationStatus:
    values = {"operation_id": "a", "requested_tokens": 20, "aligned_tokens": 16, "resident_tokens": 0}
    return OperationStatus(state=state, ttl_s=60.0, elapsed_s=0.5, namespace="n", **{**values, **fields})


def overview() -> Overview:
    engine = EngineStatus(
        namespace="n",
        storage_backend="file",
        prefetch_policy="timeout",
        prefetch_threshold_tokens=256,
        page_tokens=16,
        host_total_tokens=1000,
        host_free_tokens=900,
        prefetch_capacity_tokens=500,
        prefetch_occupied_tokens=0,
        prefetch_retries_pending=0,
        reads_in_flight=0,
        max_operations=16,
        max_operation_tokens=500,
        waiting_joins=0,
        stalled_reads=0,
        paused=False,
    )
    return Overview(active=[operation()], recent=[], engine=engine)


def answer(value: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=msgspec.json.encode(value))


def refusal(code: Code, status: int, **fields: Any) -> httpx.Response:
    return answer(ErrorReply(error=Error(code=code, message="no", **fields)), status)


def sync(handler: Handler, **options: Any) -> Toolgap:
    return Toolgap("http://server:1", transport=httpx.MockTransport(handler), **options)


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any], Any]] = [
    (
        "submit",
        (),
        {"input_ids": array("q", [1, 2]), "operation_id": "a", "ttl_s": 5.0, "cache_salt": "s"},
        {"action": "submit", "input_ids": [1, 2], "operation_id": "a", "ttl_s": 5.0, "cache_salt": "s"},
        operation(),
    ),
    (
        "submit",
        (),
        {"text": "hello", "extra_key": "k", "namespace": "n"},
        {"action": "submit", "text": "hello", "extra_key": "k", "namespace": "n"},
        operation(),
    ),
    ("status", ("a",), {}, {"action": "status", "operation_id": "a"}, operation()),
    (
        "status",
        ("a",),
        {"wait_s": 7.5},
        {"action": "status", "operation_id": "a", "wait_s": 7.5},
        operation(),
    ),
    ("overview", (), {}, {"action": "status"}, overview()),
    ("cancel", ("a",), {}, {"action": "cancel", "operation_id": "a"}, operation(State.CANCELLED)),
]


@pytest.mark.parametrize(("method", "args", "kwargs", "body", "reply"), CALLS)
def test_both_clients_send_a_call_and_read_its_reply(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any], body: dict[str, Any], reply: Any
) -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(reply)

    async def run() -> Any:
        async with AsyncToolgap(
            "http://server:1/under", api_key="key", transport=httpx.MockTransport(handler)
        ) as toolgap:
            return await getattr(toolgap, method)(*args, **kwargs)

    with sync(handler, api_key="key") as toolgap:
        assert getattr(toolgap, method)(*args, **kwargs) == reply
    assert asyncio.run(run()) == reply
    assert [str(request.url) for request in seen] == [
        "http://server:1/hicache/prefetch",
        "http://server:1/under/hicache/prefetch",
    ]
    for request in seen:
        assert request.method == "POST"
        assert request.headers["Authorization"] == "Bearer key"
        sent = {name: value for name, value in json.loads(request.content).items() if value is not None}
        assert sent == body


def test_without_a_key_none_is_sent() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert "Authorization" not in request.headers
        return answer(overview())

    with sync(handler) as toolgap:
        toolgap.overview()


def test_a_long_poll_gets_as_much_more_time_as_it_asks_for() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"] == {"connect": 2.0, "read": 102.0, "write": 2.0, "pool": 2.0}
        return answer(operation())

    with sync(handler, timeout_s=2.0) as toolgap:
        toolgap.status("a", wait_s=100.0)


def test_a_refusal_carries_the_error_and_the_status() -> None:
    with (
        sync(lambda _: refusal(Code.TOO_MANY_OPERATIONS, 429, retry_after_s=0.5)) as toolgap,
        pytest.raises(ToolgapError, match="no") as refused,
    ):
        toolgap.submit(input_ids=[1])
    assert refused.value.status_code == 429
    assert (refused.value.error.code, refused.value.error.retry_after_s) == (Code.TOO_MANY_OPERATIONS, 0.5)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        pytest.param(httpx.Response(401, json={"error": "Unauthorized"}), "API key", id="sglang-auth"),
        pytest.param(httpx.Response(404, json={"detail": "Not Found"}), "without Toolgap", id="no-route"),
        pytest.param(httpx.Response(502, html="<h1>Bad gateway</h1>"), "Bad gateway", id="proxy"),
        pytest.param(httpx.Response(200, content=b'{"some": "other"}'), "other", id="other-json"),
        pytest.param(httpx.Response(200, content=b"\xff"), "200", id="no-json"),
        pytest.param(httpx.Response(307, headers={"Location": "/x"}), "307", id="redirect"),
    ],
)
def test_a_reply_that_is_not_toolgaps(response: httpx.Response, says: str) -> None:
    with sync(lambda _: response) as toolgap, pytest.raises(ToolgapUnreachable, match=says) as error:
        toolgap.overview()
    assert error.value.status_code == response.status_code


def test_a_state_that_this_release_does_not_know_is_no_reply_of_this_protocol() -> None:
    body = json.loads(msgspec.json.encode(operation())) | {"state": "teleported"}
    with sync(lambda _: answer(body)) as toolgap, pytest.raises(ToolgapUnreachable):
        toolgap.status("a")


def test_fields_that_this_release_does_not_know_are_ignored() -> None:
    body = json.loads(msgspec.json.encode(operation())) | {"of_a_later_release": 3}
    with sync(lambda _: answer(body)) as toolgap:
        assert toolgap.status("a") == operation()


def test_transport_trouble_is_unreachable() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with sync(handler) as toolgap, pytest.raises(ToolgapUnreachable, match="refused") as error:
        toolgap.cancel("a")
    assert error.value.status_code is None

    async def run() -> None:
        async with AsyncToolgap("http://server:1", transport=httpx.MockTransport(handler)) as toolgap:
            await toolgap.cancel("a")

    with pytest.raises(ToolgapUnreachable, match="refused"):
        asyncio.run(run())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused_before_they_become_null(value: float) -> None:
    with sync(lambda _: answer(operation())) as toolgap:
        with pytest.raises(ToolgapError, match="ttl_s"):
            toolgap.submit(input_ids=[1], ttl_s=value)
        with pytest.raises(ToolgapError, match="wait_s"):
            toolgap.status("a", wait_s=value)


def test_token_ids_that_are_no_integers_are_not_rounded() -> None:
    with sync(lambda _: answer(operation())) as toolgap, pytest.raises(TypeError):
        toolgap.submit(input_ids=[1.5])  # type: ignore[list-item]


@pytest.mark.parametrize("url", ["", "server:1", "ftp://server", "http://", "http://[::1"])
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Toolgap(url)


def test_a_key_that_no_header_can_carry() -> None:
    with pytest.raises(ValueError, match="API key"):
        Toolgap(api_key="ключ")


def test_the_package_has_the_clients_and_loads_them_on_first_use() -> None:
    code = "import sys, toolgap; assert 'httpx' not in sys.modules; toolgap.Toolgap; assert 'httpx' in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    for name in toolgap.__all__:
        assert getattr(toolgap, name) is getattr(client, name)
    with pytest.raises(AttributeError, match="Toolgab"):
        _ = toolgap.Toolgab


# ---- wait ----


class Server:
    """Ends its operation at the given poll; its clock runs only while it is polled."""

    def __init__(self, ends_at_poll: int) -> None:
        self.now_s = 0.0
        self.polls: list[float] = []
        self.ends_at_poll = ends_at_poll

    def __call__(self, request: httpx.Request) -> httpx.Response:
        wait_s = json.loads(request.content)["wait_s"]
        self.polls.append(wait_s)
        if len(self.polls) == self.ends_at_poll:
            return answer(operation(State.RESTORED))
        self.now_s += wait_s
        return answer(operation(State.RESTORING))

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def ends_at_poll(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Server]:
    def make(poll: int) -> Server:
        server = Server(poll)
        monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=server.clock))
        return server

    return make


def test_wait_polls_until_the_operation_ends(ends_at_poll: Callable[[int], Server]) -> None:
    server = ends_at_poll(3)
    with sync(server) as toolgap:
        assert toolgap.wait("a", timeout_s=60.0).state is State.RESTORED
    assert server.polls == [25.0, 25.0, 10.0]


def test_wait_gives_up_in_time_and_looks_once_more(ends_at_poll: Callable[[int], Server]) -> None:
    server = ends_at_poll(0)
    with sync(server) as toolgap, pytest.raises(TimeoutError, match="restoring after 30 s"):
        toolgap.wait("a", timeout_s=30.0)
    assert server.polls == [25.0, 5.0, 0.0]


def test_a_wait_of_no_time_is_one_look(ends_at_poll: Callable[[int], Server]) -> None:
    server = ends_at_poll(1)
    with sync(server) as toolgap:
        assert toolgap.wait("a", timeout_s=0.0).state is State.RESTORED
    assert server.polls == [0.0]


def test_the_async_client_waits_alike() -> None:
    polls = []

    def handler(request: httpx.Request) -> httpx.Response:
        polls.append(json.loads(request.content)["wait_s"])
        return answer(operation(State.MISS if len(polls) == 2 else State.QUERYING))

    async def run() -> OperationStatus:
        async with AsyncToolgap("http://server:1", transport=httpx.MockTransport(handler)) as toolgap:
            return await toolgap.wait("a", timeout_s=1000.0)

    assert asyncio.run(run()).state is State.MISS
    assert polls == [25.0, 25.0]


# ---- retries ----


class Busy:
    """Answers with what it is given, one after another; its clock runs only while the client sleeps."""

    def __init__(self, *answers: httpx.Response | type[httpx.TransportError]) -> None:
        self.answers = list(answers)
        self.now_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.timeouts: list[float] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append({name: value for name, value in body.items() if value is not None})
        self.timeouts.append(request.extensions["timeout"]["read"])
        answer = self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, content=answer.content)
        raise answer("down", request=request)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


Submitter = Callable[..., OperationStatus]


@pytest.fixture(params=["sync", "async"])
def submit_to(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Submitter]:
    """Makes a client's ``submit`` for a busy server, with jitter at its longest."""

    def make(server: Busy, **options: Any) -> Submitter:
        time = SimpleNamespace(monotonic=lambda: server.now_s, sleep=server.sleep)
        monkeypatch.setattr(calls, "time", time)
        monkeypatch.setattr(client, "time", time)
        monkeypatch.setattr(client, "asyncio", SimpleNamespace(sleep=server.sleep_async))
        monkeypatch.setattr(calls, "random", SimpleNamespace(random=lambda: 1.0))

        def submit(**fields: Any) -> OperationStatus:
            with sync(server, **options) as toolgap:
                return toolgap.submit(**fields)

        async def submit_async(**fields: Any) -> OperationStatus:
            transport = httpx.MockTransport(server)
            async with AsyncToolgap("http://server:1", transport=transport, **options) as toolgap:
                return await toolgap.submit(**fields)

        if request.param == "sync":
            return submit
        return lambda **fields: asyncio.run(submit_async(**fields))

    return make


def full(retry_after_s: float = 1.0) -> httpx.Response:
    return refusal(Code.HOST_BUDGET, 429, retry_after_s=retry_after_s)


def test_a_refusal_that_passes_is_tried_again(submit_to: Callable[..., Submitter]) -> None:
    server = Busy(full(0.5), full(0.5), refusal(Code.PAUSED, 503, retry_after_s=2.0), answer(operation()))
    assert submit_to(server)(input_ids=[1], retry_for_s=60.0) == operation()
    assert server.pauses == [1.0, 1.5, 4.0]


def test_every_attempt_names_the_same_operation(submit_to: Callable[..., Submitter]) -> None:
    server = Busy(httpx.ReadError, full(), answer(operation()))
    submit_to(server)(input_ids=[1], retry_for_s=60.0)
    first, *others = server.bodies
    assert first["operation_id"]
    assert others == [first, first]
    server = Busy(full(), answer(operation()))
    submit_to(server)(input_ids=[1], retry_for_s=60.0, operation_id="mine")
    assert [body["operation_id"] for body in server.bodies] == ["mine", "mine"]


@pytest.mark.parametrize("fields", [{}, {"retry_for_s": 0.0}, {"retry_for_s": 0.0, "expected_gap_s": 9.0}])
def test_without_a_limit_nothing_is_tried_again(
    submit_to: Callable[..., Submitter], fields: dict[str, Any]
) -> None:
    server = Busy(full())
    with pytest.raises(ToolgapError):
        submit_to(server)(input_ids=[1], **fields)
    assert not server.pauses
    assert "operation_id" not in server.bodies[0]


def test_it_gives_up_before_the_continuation_is_due(submit_to: Callable[..., Submitter]) -> None:
    server = Busy(full(3.0), full(3.0), full(3.0))
    with pytest.raises(ToolgapError) as refused:
        submit_to(server)(input_ids=[1], expected_gap_s=10.0)
    assert refused.value.error.code is Code.HOST_BUDGET
    assert server.pauses == [6.0, 4.0]
    server = Busy(full(3.0))
    with pytest.raises(ToolgapError):
        submit_to(server)(input_ids=[1], expected_gap_s=3.0)
    assert not server.pauses


def test_the_server_is_told_what_is_left_of_the_gap(submit_to: Callable[..., Submitter]) -> None:
    server = Busy(full(), full(), answer(operation()))
    submit_to(server)(input_ids=[1], expected_gap_s=20.0)
    assert [body["expected_gap_s"] for body in server.bodies] == [20.0, 18.0, 15.0]
    server = Busy(full(), full(), answer(operation()))
    submit_to(server)(input_ids=[1], expected_gap_s=2.5, retry_for_s=60.0)
    assert [body["expected_gap_s"] for body in server.bodies] == [2.5, 0.5, 0.001]


def test_a_repeated_attempt_does_not_wait_long_beyond_the_limit(submit_to: Callable[..., Submitter]) -> None:
    server = Busy(full(), full(), full(2.0), answer(operation()))
    submit_to(server, timeout_s=8.0)(input_ids=[1], retry_for_s=10.0)
    assert server.pauses == [2.0, 3.0, 5.0]
    assert server.timeouts == [8.0, 8.0, 5.0, 1.0]


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError])
def test_a_failed_connection_is_tried_again(
    submit_to: Callable[..., Submitter], error: type[httpx.TransportError]
) -> None:
    server = Busy(error, error, answer(operation()))
    assert submit_to(server)(input_ids=[1], retry_for_s=1.0) == operation()
    assert server.pauses == pytest.approx([0.2, 0.3])
    server = Busy(*[error] * 20)
    with pytest.raises(ToolgapUnreachable, match="down"):
        submit_to(server)(input_ids=[1], retry_for_s=1.0)
    assert sum(server.pauses) <= 1.0
    assert all(earlier < later for earlier, later in pairwise(server.pauses[:-1]))


@pytest.mark.parametrize(
    "response",
    [
        refusal(Code.NAMESPACE_MISMATCH, 409),
        refusal(Code.STORAGE_REPLACED, 409),
        refusal(Code.PREFIX_TOO_LARGE, 429),
        httpx.Response(401, json={"error": "Unauthorized"}),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.UnsupportedProtocol,
    ],
)
def test_what_does_not_pass_is_not_tried_again(submit_to: Callable[..., Submitter], response: Any) -> None:
    server = Busy(response)
    with pytest.raises((ToolgapError, ToolgapUnreachable)):
        submit_to(server)(input_ids=[1], retry_for_s=60.0)
    assert not server.pauses


@pytest.mark.parametrize("limit_s", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none(submit_to: Callable[..., Submitter], limit_s: float) -> None:
    server = Busy()
    with pytest.raises(ValueError, match="retry_for_s"):
        submit_to(server)(input_ids=[1], retry_for_s=limit_s)
    assert not server.bodies
