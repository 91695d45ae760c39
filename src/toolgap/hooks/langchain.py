"""Callback handler and agent middleware of LangChain and LangGraph (``pip install 'toolgap[langchain]'``)::

    agent = create_agent(model, tools, middleware=[ToolgapMiddleware("http://127.0.0.1:30000")])

or, where agents are not made by ``create_agent``::

    graph.invoke(state, config={"callbacks": [ToolgapCallbackHandler("http://127.0.0.1:30000")]})

One of the two, not both: they do the same. Either serves synchronous and asynchronous agents, since neither
waits for anything.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.runtime import Runtime
from langgraph.types import Command

from toolgap.client import DEFAULT_URL, PrefixFields, Toolgap
from toolgap.hooks.restores import Call, Restores, as_restores
from toolgap.hooks.tool_calls import Answer, Message
from toolgap.protocol import PROMPT_FIELDS

MAX_REMEMBERED = 4096


class _Remembered(OrderedDict[Any, Any]):
    """A mapping that forgets its oldest entries: runs that failed are never ended."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_REMEMBERED:
            self.popitem(last=False)


class _Hook:
    """What handler and middleware share: sessions are found again by their tool calls."""

    restores: Restores
    _session_of: dict[str, str]

    def _answered(self, session: str, request: PrefixFields, message: BaseMessage) -> None:
        if not isinstance(message, AIMessage):
            return
        calls = [Call(call["id"] or "", call["name"]) for call in message.tool_calls]
        for call in calls:
            self._session_of[call.id] = session
        answer = Answer(
            request_id=_completion_id(message),
            request=request,
            messages=_messages([message]),
            calls=[call.id for call in calls],
        )
        self.restores.answered(session, answer, calls)

    def _ended(self, call_id: str, result: Any) -> None:
        session = self._session_of.pop(call_id, None)
        if session is not None:
            message = _messages([result])[0] if isinstance(result, ToolMessage) else None
            self.restores.ended(session, call_id, message)


class ToolgapMiddleware(AgentMiddleware[AgentState[Any], Any, Any], _Hook):
    """Restores what an agent's next request will begin with, while its tools run.

    Args:
        server: Toolgap's URL, a client, or :class:`Restores` that several hooks share.
        **options: Of :class:`Restores`.
    """

    def __init__(self, server: str | Toolgap | Restores = DEFAULT_URL, **options: Any) -> None:
        super().__init__()
        self.restores = as_restores(server, options)
        self._session_of = _Remembered()

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Submit, if the answer calls tools."""
        response = handler(request)
        self._model_answered(request, response)
        return response

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """As :meth:`wrap_model_call`."""
        response = await handler(request)
        self._model_answered(request, response)
        return response

    def wrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]],
    ) -> ToolMessage | Command[Any]:
        """Refresh once the tool has ended, with its result."""
        call_id = self._tool_started(request)
        result: ToolMessage | Command[Any] | None = None
        try:
            result = handler(request)
            return result
        finally:
            with self.restores.harmless("reading a tool's result"):
                self._ended(call_id, result)

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """As :meth:`wrap_tool_call`."""
        call_id = self._tool_started(request)
        result: ToolMessage | Command[Any] | None = None
        try:
            result = await handler(request)
            return result
        finally:
            with self.restores.harmless("reading a tool's result"):
                self._ended(call_id, result)

    def after_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        """Cancel what is left: the agent has ended."""
        with self.restores.harmless("ending a session"):
            self.restores.closed(_session(state["messages"]))

    async def aafter_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        """As :meth:`after_agent`."""
        self.after_agent(state, runtime)

    def _model_answered(self, request: ModelRequest[Any], response: ModelResponse[Any]) -> None:
        with self.restores.harmless("reading a model's answer"):
            system = [request.system_message] if request.system_message is not None else []
            fields = dict(request.model_settings)
            if request.tools:
                fields["tools"] = [convert_to_openai_tool(tool) for tool in request.tools]
            asked = _request(fields, [*system, *request.messages])
            session = _session(request.state["messages"])
            for message in response.result[:1]:
                self._answered(session, asked, message)

    def _tool_started(self, request: ToolCallRequest) -> str:
        call = Call(request.tool_call["id"] or "", request.tool_call["name"])
        with self.restores.harmless("reading a tool call"):
            if (session := self._session_of.get(call.id)) is not None:
                self.restores.started(session, call)
        return call.id


class ToolgapCallbackHandler(BaseCallbackHandler, _Hook):
    """As :class:`ToolgapMiddleware`, for whatever runs chat models and tools: pass it as a callback."""

    run_inline = True
    """An asynchronous run calls it in place, since nothing here waits."""

    def __init__(self, server: str | Toolgap | Restores = DEFAULT_URL, **options: Any) -> None:
        self.restores = as_restores(server, options)
        self._session_of = _Remembered()
        self._root_of: dict[UUID, UUID] = _Remembered()
        self._request_of: dict[UUID, PrefixFields] = _Remembered()
        self._call_of: dict[UUID, str] = _Remembered()

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember which run this one belongs to."""
        self._root_of[run_id] = self._root(run_id, parent_run_id)

    def on_chain_end(
        self,
        outputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Cancel what is left, once the outermost run has ended."""
        with self.restores.harmless("ending a session"):
            self._root_of.pop(run_id, None)
            if parent_run_id is None:
                self.restores.closed(str(run_id))

    def on_chain_error(
        self,
        error: BaseException,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """As :meth:`on_chain_end`."""
        self.on_chain_end({}, run_id=run_id, parent_run_id=parent_run_id)

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember what is asked."""
        with self.restores.harmless("reading a model's request"):
            if len(messages) == 1:
                self._request_of[run_id] = _request(kwargs.get("invocation_params") or {}, messages[0])

    def on_llm_end(
        self,
        response: LLMResult,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """Submit, if the answer calls tools."""
        with self.restores.harmless("reading a model's answer"):
            request = self._request_of.pop(run_id, PrefixFields())
            session = str(self._root(run_id, parent_run_id))
            for generations in response.generations[:1]:
                for generation in generations[:1]:
                    if isinstance(generation, ChatGeneration):
                        self._answered(session, request, generation.message)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """The tool's time begins."""
        with self.restores.harmless("reading a tool call"):
            call_id = kwargs.get("tool_call_id")
            if call_id in self._session_of:
                self._call_of[run_id] = call_id
                name = str((serialized or {}).get("name", ""))
                self.restores.started(self._session_of[call_id], Call(call_id, name))

    def on_tool_end(
        self, output: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Refresh, with the result if it is the next that the model will be shown."""
        with self.restores.harmless("reading a tool's result"):
            call_id = self._call_of.pop(run_id, None)
            if call_id is not None:
                self._ended(call_id, output)

    def on_tool_error(
        self,
        error: BaseException,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """As :meth:`on_tool_end`."""
        self.on_tool_end(None, run_id=run_id)

    def _root(self, run_id: UUID, parent_run_id: UUID | None) -> UUID:
        return run_id if parent_run_id is None else self._root_of.get(parent_run_id, parent_run_id)


def _session(messages: Sequence[BaseMessage]) -> str:
    """A conversation's name: LangGraph gives every message an id, and the first one stays."""
    return str(messages[0].id) if messages else ""


def _request(fields: Mapping[str, Any], messages: Iterable[BaseMessage]) -> PrefixFields:
    """A request's body as far as it shapes the prompt."""
    extra = fields.get("extra_body")
    known = {**fields, **(extra if isinstance(extra, Mapping) else {})}
    request = {name: known[name] for name in PROMPT_FIELDS if known.get(name) is not None}
    # Says which adapter to use, where it is a served name; LangChain sends it under several names.
    request.pop("model", None)
    return cast("PrefixFields", {**request, "messages": _messages(messages)})


def _messages(messages: Iterable[BaseMessage]) -> list[Message]:
    return [*convert_to_openai_messages(list(messages))]


def _completion_id(message: AIMessage) -> str | None:
    """The ``id`` of the chat completion: only an OpenAI chat model's answer has one that SGLang knows."""
    completion = message.response_metadata.get("id")
    return completion if isinstance(completion, str) else None
