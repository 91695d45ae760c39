"""A restore around a tool call: what is sent when, and that nothing of it reaches the agent."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import pytest

from toolgap import jobs
from toolgap.client import AsyncToolgap, Toolgap, ToolgapError, ToolgapUnreachable
from toolgap.protocol import Code, Error, ErrorReply, OperationStatus, Reason, State

URL = "http://server:1"
Answer = httpx.Response | type[httpx.TransportError]
Teller = Callable[[dict[str, Any]], Answer]


class ToolError(Exception):
    """What a tool raises."""


def accepted(body: dict[str, Any], state: State = State.RESTORING, **fields: Any) -> httpx.Response:
    status = OperationStatus(
        operation_id=body["operation_id"],
        state=state,
        reason=Reason.COMPLETE if state.terminal else None,
        requested_tokens=1000,
        aligned_tokens=992,
        resident_tokens=0,
        ttl_s=60.0,
        elapsed_s=0.5,
        namespace="n",
        **fields,
    )
    return httpx.Response(200, content=msgspec.json.encode(status))


def refused(code: Code, status: int = 429, **fields: Any) -> httpx.Response:
    error = ErrorReply(error=Error(code=code, message="no", **fields))
    return httpx.Response(status, content=msgspec.json.encode(error))


def _teller(answer: Answer | Teller) -> Teller:
    if isinstance(answer, httpx.Response):
        status, content = answer.status_code, answer.content
        return lambda _: httpx.Response(status, content=content)
    if isinstance(answer, type):
        error: type[httpx.TransportError] = answer
        return lambda _: error
    return answer


class Server:
    """Accepts and cancels what it is asked, unless told to answer otherwise."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: dict[str, list[Teller]] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = {name: value for name, value in json.loads(request.content).items() if value is not None}
        self.bodies.append(body)
        told = self.answers.get(body["action"])
        state = State.CANCELLED if body["action"] == "cancel" else State.RESTORING
        answer = told.pop(0)(body) if told else accepted(body, state)
        if isinstance(answer, httpx.Response):
            return answer
        raise answer("down", request=request)

    def will(self, action: str, *answers: Answer | Teller) -> None:
        """Answer the next calls of an action so."""
        self.answers[action] = [_teller(answer) for answer in answers]

    @property
    def actions(self) -> list[str]:
        return [body["action"] for body in self.bodies]


class Agent:
    """Uses either client from plain functions: coroutines run on a loop of its own."""

    def __init__(self, server: Server, *, is_async: bool) -> None:
        self._runner = asyncio.Runner() if is_async else None
        self._transport = httpx.MockTransport(server)
        self._client: Any = None

    def client(self, **options: Any) -> Any:
        kind = Toolgap if self._runner is None else AsyncToolgap
        self._client = kind(URL, transport=self._transport, **options)
        return self._client

    def do(self, value: Any) -> Any:
        return value if self._runner is None else self._runner.run(value)

    def restoring(self, client: dict[str, Any] | None = None, **fields: Any) -> "Around":
        self.client(**(client or {}))
        return Around(self, self._client.restoring(**fields))

    def settle(self) -> None:
        """Close the client: everything that it had begun is done."""
        self.do(self._client.close())

    def close(self) -> None:
        if self._client is not None:
            self.settle()
        if self._runner is not None:
            self._runner.close()


class Around:
    """``with`` for both forms."""

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._prefix = "a" if agent._runner is not None else ""

    def __enter__(self) -> Any:
        enter = getattr(self._handle, f"__{self._prefix}enter__")
        return self._agent.do(enter())

    def __exit__(self, *exception: Any) -> None:
        leave = getattr(self._handle, f"__{self._prefix}exit__")
        self._agent.do(leave(*exception))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture(params=["sync", "async"])
def agent(request: pytest.FixtureRequest, server: Server) -> Iterator[Agent]:
    agent = Agent(server, is_async=request.param == "async")
    yield agent
    agent.close()


# ---- the life of a restore ----


def test_a_block_that_ends_leaves_the_operation_to_the_continuation(agent: Agent, server: Server) -> None:
    with agent.restoring(request_id="turn-7", expected_gap_s=20.0) as restore:
        status = agent.do(restore.status())
        assert (status.state, restore.outcome, restore.error) == (State.RESTORING, None, None)
    agent.settle()
    assert server.actions == ["submit", "status"]
    submit, ask = server.bodies
    assert (submit["request_id"], submit["expected_gap_s"]) == ("turn-7", 20.0)
    assert submit["operation_id"] == ask["operation_id"] == restore.operation_id


@pytest.mark.parametrize("error", [ToolError, KeyboardInterrupt, asyncio.CancelledError])
def test_a_block_that_raises_cancels(agent: Agent, server: Server, error: type[BaseException]) -> None:
    with pytest.raises(error), agent.restoring(text="a"):
        raise error
    agent.settle()
    assert server.actions == ["submit", "cancel"]
    assert server.bodies[0]["operation_id"] == server.bodies[1]["operation_id"]


def test_a_block_that_raises_and_is_kept_does_not(agent: Agent, server: Server) -> None:
    with suppress(ToolError), agent.restoring(text="a") as restore:
        restore.keep()
        raise ToolError
    agent.settle()
    assert server.actions == ["submit"]


def test_what_is_abandoned_is_cancelled_once(agent: Agent, server: Server) -> None:
    with agent.restoring(text="a", operation_id="mine") as restore:
        agent.do(restore.abandon())
        assert agent.do(restore.status()).state is State.RESTORING
    agent.settle()
    assert server.actions == ["submit", "cancel", "status"]
    assert server.bodies[1]["operation_id"] == "mine"


@pytest.mark.parametrize(("lease_s", "actions"), [(None, ["submit"]), (9.0, ["submit", "cancel"])])
def test_an_outcome_is_cancelled_only_if_it_holds_a_lease(
    agent: Agent, server: Server, lease_s: float | None, actions: list[str]
) -> None:
    server.will("submit", lambda body: accepted(body, State.RESTORED, lease_s=lease_s))
    with suppress(ToolError), agent.restoring(text="a", lease_s=lease_s) as restore:
        raise ToolError
    agent.settle()
    assert server.actions == actions
    assert restore.outcome is not None


def test_it_is_entered_once(agent: Agent) -> None:
    around = agent.restoring(text="a")
    with around:
        pass
    with pytest.raises(RuntimeError, match="once"):
        around.__enter__()


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refused(Code.NOT_WORTHWHILE, 409), ToolgapError),
        (httpx.Response(404, json={"detail": "Not Found"}), ToolgapUnreachable),
        (httpx.Response(401, json={"error": "Unauthorized"}), ToolgapUnreachable),
    ],
)
def test_a_missed_restore_is_no_error(
    agent: Agent, server: Server, caplog: pytest.LogCaptureFixture, answer: Answer, kind: type[Exception]
) -> None:
    caplog.set_level(logging.DEBUG, "toolgap.client")
    server.will("submit", answer)
    with suppress(ToolError), agent.restoring(text="a") as restore:
        assert agent.do(restore.status()) is None
        assert isinstance(restore.error, kind)
        raise ToolError
    agent.settle()
    assert server.actions == ["submit"]
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_submit_whose_reply_was_lost_is_cancelled_too(agent: Agent, server: Server) -> None:
    server.will("submit", httpx.ReadTimeout)
    server.will("cancel", refused(Code.UNKNOWN_OPERATION, 404))
    with suppress(ToolError), agent.restoring(text="a") as restore:
        raise ToolError
    agent.settle()
    assert server.actions == ["submit", "cancel"]
    assert isinstance(restore.error, ToolgapUnreachable)


def test_a_cancel_that_fails_is_told_in_error(agent: Agent, server: Server) -> None:
    server.will("cancel", httpx.ConnectError)
    with suppress(ToolError), agent.restoring(text="a", strict=True) as restore:
        raise ToolError
    agent.settle()
    assert isinstance(restore.error, ToolgapUnreachable)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": object()}]},
        {"text": "\udcff"},
        {"input_ids": ["one"]},
        {"text": "a", "ttl_s": float("nan")},
        {"text": "a", "retry_for_s": -1.0},
    ],
)
def test_what_cannot_be_sent_does_not_reach_the_agent_either(
    agent: Agent, server: Server, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    with agent.restoring(**fields) as restore:
        assert agent.do(restore.status()) is None
    assert restore.error is not None
    assert not server.bodies
    assert "not restored" in caplog.text or isinstance(restore.error, ToolgapError)


def test_a_field_that_there_is_not_is_told_at_once(agent: Agent) -> None:
    with pytest.raises(TypeError, match="request_idd"):
        agent.restoring(request_idd="a")


def test_a_failed_status_leaves_the_last_one(agent: Agent, server: Server) -> None:
    with agent.restoring(text="a") as restore:
        first = agent.do(restore.status())
        server.will("status", httpx.ConnectError)
        assert agent.do(restore.status()) is first
        assert isinstance(restore.error, ToolgapUnreachable)


def test_retries_end_with_the_block(agent: Agent, server: Server) -> None:
    server.will("submit", *[refused(Code.PAUSED, 503, retry_after_s=1000.0)] * 3)
    with agent.restoring(text="a", retry_for_s=5000.0) as restore:
        pass
    agent.settle()
    assert server.actions == ["submit"]
    assert isinstance(restore.error, ToolgapError)


# ---- strict ----


@pytest.mark.parametrize(
    ("client", "call"),
    [({"strict": True}, {}), ({}, {"strict": True}), ({"strict": False}, {"strict": True})],
)
def test_strict_raises_what_went_wrong(
    agent: Agent, server: Server, client: dict[str, Any], call: dict[str, Any]
) -> None:
    server.will("submit", refused(Code.PAUSED, 503, retry_after_s=1.0))
    ran = False
    with pytest.raises(ToolgapError), agent.restoring(client, text="a", **call):
        ran = True
    assert not ran


def test_strict_raises_from_every_step(agent: Agent, server: Server) -> None:
    with agent.restoring({"strict": True}, text="a") as restore:
        assert restore.last_status.state is State.RESTORING
        server.will("submit", refused(Code.PREFIX_TOO_LARGE))
        with pytest.raises(ToolgapError):
            agent.do(restore.refresh(text="ab"))
        server.will("status", httpx.ConnectError)
        with pytest.raises(ToolgapUnreachable):
            agent.do(restore.status())
        server.will("cancel", httpx.ConnectError)
        with pytest.raises(ToolgapUnreachable):
            agent.do(restore.abandon())


def test_a_call_may_be_less_strict_than_its_client(agent: Agent, server: Server) -> None:
    server.will("submit", refused(Code.PREFIX_TOO_LARGE))
    with agent.restoring({"strict": True}, text="a", strict=False) as restore:
        assert agent.do(restore.status()) is None


# ---- refresh ----


def test_a_refresh_takes_the_earlier_ones_place(agent: Agent, server: Server) -> None:
    with agent.restoring(input_ids=[1], cache_salt="s", expected_gap_s=1000.0) as restore:
        first = restore.operation_id
        agent.do(restore.refresh(input_ids=[1, 2]))
        agent.do(restore.status())
        assert restore.operation_id != first
    agent.settle()
    assert server.actions == ["submit", "submit", "cancel", "status"]
    _, again, cancel, ask = server.bodies
    assert (again["input_ids"], again["cache_salt"]) == ([1, 2], "s")
    assert 0 < again["expected_gap_s"] < 1000.0
    assert cancel["operation_id"] == first
    assert ask["operation_id"] == again["operation_id"] == restore.operation_id


def test_a_refresh_may_name_the_prefix_in_another_way(agent: Agent, server: Server) -> None:
    with agent.restoring(
        messages=[{"role": "user"}], tools=[{"name": "f"}], cache_salt="s", ttl_s=5.0
    ) as restore:
        agent.do(restore.refresh(messages=[{"role": "tool"}]))
        agent.do(restore.refresh(request_id="turn-8", operation_id="mine"))
    agent.settle()
    _, same, other = [body for body in server.bodies if body["action"] == "submit"]
    assert same["tools"] == [{"name": "f"}]
    assert other == {"action": "submit", "request_id": "turn-8", "operation_id": "mine", "ttl_s": 5.0}


def test_a_refused_refresh_leaves_the_earlier_one_in_its_place(agent: Agent, server: Server) -> None:
    with suppress(ToolError), agent.restoring(text="a") as restore:
        first = restore.operation_id
        agent.do(restore.status())
        server.will("submit", refused(Code.PREFIX_TOO_LARGE))
        agent.do(restore.refresh(text="ab"))
        assert agent.do(restore.status()).operation_id == first
        assert isinstance(restore.error, ToolgapError)
        raise ToolError
    agent.settle()
    assert server.actions == ["submit", "status", "submit", "status", "cancel"]
    assert server.bodies[-1]["operation_id"] == first


def test_a_refresh_without_room_cancels_first(agent: Agent, server: Server) -> None:
    with agent.restoring(text="a") as restore:
        first = restore.operation_id
        agent.do(restore.status())
        server.will("submit", refused(Code.TOO_MANY_OPERATIONS, retry_after_s=1.0))
        agent.do(restore.refresh(text="ab"))
        assert agent.do(restore.status()).operation_id != first
        assert restore.error is None
    agent.settle()
    assert server.actions == ["submit", "status", "submit", "cancel", "submit", "status"]


def test_a_refresh_after_a_refusal_is_a_submit(agent: Agent, server: Server) -> None:
    server.will("submit", refused(Code.PREFIX_TOO_LARGE))
    with agent.restoring(text="a") as restore:
        agent.do(restore.refresh())
        assert agent.do(restore.status()).operation_id == restore.operation_id
        assert restore.error is None
    assert [body.get("text") for body in server.bodies] == ["a", "a", None]


# ---- beside the block, and not before it ----


def test_the_sync_submit_does_not_delay_the_tool_call() -> None:
    tool_is_done = threading.Event()
    answered = []

    def handler(request: httpx.Request) -> httpx.Response:
        answered.append(tool_is_done.wait(60.0))
        return accepted(json.loads(request.content))

    with (
        Toolgap(URL, transport=httpx.MockTransport(handler)) as toolgap,
        toolgap.restoring(text="a") as restore,
    ):
        assert restore.last_status is None
        tool_is_done.set()
    assert answered == [True]
    assert restore.last_status is not None


def test_the_async_submit_does_not_delay_the_tool_call() -> None:
    async def run() -> None:
        tool_is_done = asyncio.Event()

        async def handler(request: httpx.Request) -> httpx.Response:
            await tool_is_done.wait()
            return accepted(json.loads(request.content))

        async with (
            AsyncToolgap(URL, transport=httpx.MockTransport(handler)) as toolgap,
            toolgap.restoring(text="a") as restore,
        ):
            before = restore.last_status
            tool_is_done.set()
        assert (before, restore.last_status is None) == (None, False)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_cancelled_task_cancels_its_restore(server: Server) -> None:
    async def run() -> None:
        async with AsyncToolgap(URL, transport=httpx.MockTransport(server)) as toolgap:
            running = asyncio.Event()

            async def call_tool() -> None:
                async with toolgap.restoring(text="a"):
                    running.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(call_tool())
            await running.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(run())
    assert server.actions == ["submit", "cancel"]


def test_a_server_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CLOSING_S", 0.01)

    async def run() -> None:
        async def handler(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError("it never answers")

        async with AsyncToolgap(URL, transport=httpx.MockTransport(handler)) as toolgap:
            with suppress(ToolError):
                async with toolgap.restoring(text="a"):
                    await asyncio.sleep(0)
                    raise ToolError
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())

    end = threading.Event()

    def handler(request: httpx.Request) -> httpx.Response:
        end.wait(60.0)
        return accepted(json.loads(request.content))

    with (
        Toolgap(URL, transport=httpx.MockTransport(handler)) as toolgap,
        toolgap.restoring(text="a") as restore,
    ):
        pass
    assert restore.last_status is None
    end.set()
    assert restore._job is not None
    restore._job.join()


def test_a_system_without_threads_does_not_reach_the_agent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with (
        suppress(ToolError),
        Toolgap(URL, transport=httpx.MockTransport(server)) as toolgap,
        toolgap.restoring(text="a") as restore,
    ):
        assert isinstance(restore.error, RuntimeError)
        assert restore.status() is None
        raise ToolError
    with pytest.raises(RuntimeError), toolgap.restoring(text="a", strict=True):
        pass
    assert not server.bodies


def test_a_coroutine_that_is_closed_and_not_awaited_does_not_reach_the_agent(server: Server) -> None:
    toolgap = AsyncToolgap(URL, transport=httpx.MockTransport(server))

    class Suspended:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def call_tool() -> None:
        async with toolgap.restoring(text="a"):
            await Suspended()

    async def begin() -> Coroutine[Any, Any, None]:
        coroutine = call_tool()
        coroutine.send(None)
        return coroutine

    asyncio.run(begin()).close()


def test_what_the_agent_does_with_its_messages_meanwhile_is_not_sent(agent: Agent, server: Server) -> None:
    messages = [{"role": "assistant"}]
    tools = [{"name": "f"}]
    with agent.restoring(messages=messages, tools=tools) as restore:
        messages.append({"role": "tool"})
        tools.clear()
        agent.do(restore.refresh())
    agent.settle()
    submits = [body for body in server.bodies if body["action"] == "submit"]
    assert [body["messages"] for body in submits] == [[{"role": "assistant"}]] * 2
    assert [body["tools"] for body in submits] == [[{"name": "f"}]] * 2


def test_an_sdks_objects_are_sent_as_it_would_send_them(agent: Agent, server: Server) -> None:
    class Message:
        def model_dump(self, **options: Any) -> dict[str, Any]:
            assert options == {"mode": "json", "exclude_unset": True}
            return {"role": "assistant", "content": "hello"}

    with agent.restoring(messages=[Message()]):
        pass
    agent.settle()
    assert server.bodies[0]["messages"] == [{"role": "assistant", "content": "hello"}]
