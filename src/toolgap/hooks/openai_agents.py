"""Run hooks of the OpenAI Agents SDK (``pip install 'toolgap[openai-agents]'``)::

    hooks = ToolgapRunHooks("http://127.0.0.1:30000")
    await Runner.run(agent, "Mend the test.", hooks=hooks)

An answer's tool calls submit as soon as it is there, before the SDK runs them. The prefix is named by the
completion's id; where every part of the request is known here, by messages too, so that results can join.
"""

from collections import OrderedDict
from typing import Any, NamedTuple, cast

from agents import (
    Agent,
    AgentHookContext,
    ModelResponse,
    RunContextWrapper,
    RunHooks,
    Tool,
    TResponseInputItem,
)
from agents.items import ItemHelpers, TResponseOutputItem
from agents.models.chatcmpl_converter import Converter
from agents.tool_context import ToolContext
from agents.usage import Usage
from openai.types.responses import ResponseFunctionToolCall

from toolgap.client import DEFAULT_URL, PrefixFields, Toolgap
from toolgap.hooks.restores import Call, Restores, as_restores
from toolgap.hooks.tool_calls import Answer, Message
from toolgap.protocol import PROMPT_FIELDS

MAX_RUNS = 1024


class _Run(NamedTuple):
    usage: Usage
    """What all contexts of a run share; held, so that its identity stays its own."""
    session: str
    requests: dict[str, PrefixFields]
    """The last request of each agent."""
    inputs: dict[str, list[TResponseInputItem]]


class ToolgapRunHooks(RunHooks[Any]):
    """Restores what an agent's next request will begin with, while its tools run.

    Args:
        server: Toolgap's URL, a client, or :class:`Restores` that several hooks share.
        **options: Of :class:`Restores`.
    """

    def __init__(self, server: str | Toolgap | Restores = DEFAULT_URL, **options: Any) -> None:
        self.restores = as_restores(server, options)
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._count = 0

    async def on_llm_start(
        self,
        context: RunContextWrapper[Any],
        agent: Agent[Any],
        system_prompt: str | None,
        input_items: list[TResponseInputItem],
    ) -> None:
        """Remember what is asked."""
        with self.restores.harmless("reading an agent's request"):
            run = self._run(context)
            run.inputs[agent.name] = list(input_items)
            run.requests[agent.name] = await _request(context, agent, system_prompt, input_items)

    async def on_llm_end(
        self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse
    ) -> None:
        """Submit, if the answer calls tools."""
        with self.restores.harmless("reading a model's answer"):
            run = self._run(context)
            request = run.requests.pop(agent.name, PrefixFields())
            asked = run.inputs.pop(agent.name, [])
            calls = [
                Call(item.call_id, item.name)
                for item in response.output
                if isinstance(item, ResponseFunctionToolCall)
            ]
            messages = _answer_messages(asked, response) if request else []
            answer = Answer(
                request_id=_completion_id(response.output),
                request=request if messages else PrefixFields(),
                messages=messages,
                calls=[call.id for call in calls],
            )
            self.restores.answered(run.session, answer, calls)

    async def on_tool_start(self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool) -> None:
        """The tool's time begins."""
        if isinstance(context, ToolContext):
            with self.restores.harmless("reading a tool call"):
                call = Call(context.tool_call_id, context.tool_name)
                self.restores.started(self._run(context).session, call)

    async def on_tool_end(
        self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool, result: object
    ) -> None:
        """Refresh, with the result if it is the next that the model will be shown."""
        if isinstance(context, ToolContext):
            with self.restores.harmless("reading a tool's result"):
                call_id, message = context.tool_call_id, None
                if context.tool_call is not None:
                    item = ItemHelpers.tool_call_output_item(context.tool_call, result)
                    message = _messages([cast("TResponseInputItem", item)])[0]
                self.restores.ended(self._run(context).session, call_id, message)

    async def on_agent_end(self, context: AgentHookContext[Any], agent: Agent[Any], output: Any) -> None:
        """Cancel what is left: the run has its final output."""
        with self.restores.harmless("ending a run"):
            run = self._runs.pop(id(context.usage), None)
            if run is not None:
                self.restores.closed(run.session)

    def _run(self, context: RunContextWrapper[Any]) -> _Run:
        key = id(context.usage)
        if key not in self._runs:
            self._count += 1
            self._runs[key] = _Run(context.usage, f"openai-agents-{id(self)}-{self._count}", {}, {})
            if len(self._runs) > MAX_RUNS:
                _, oldest = self._runs.popitem(last=False)
                self.restores.closed(oldest.session)
        return self._runs[key]


async def _request(
    context: RunContextWrapper[Any],
    agent: Agent[Any],
    system_prompt: str | None,
    input_items: list[TResponseInputItem],
) -> PrefixFields:
    """The request's body as far as it shapes the prompt; empty where the SDK does not tell a hook all of it."""
    if agent.mcp_servers or agent.handoffs or agent.output_type is not None:
        return PrefixFields()
    settings = agent.model_settings
    extra = settings.extra_body if isinstance(settings.extra_body, dict) else {}
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    request: dict[str, Any] = {name: extra[name] for name in PROMPT_FIELDS if name in extra}
    request["messages"] = [*system, *_messages(input_items)]
    tools = await agent.get_all_tools(context)
    if tools:
        request["tools"] = [Converter.tool_to_openai(tool) for tool in tools]
    return cast("PrefixFields", request)


def _messages(items: list[TResponseInputItem]) -> list[Message]:
    """Items as the SDK's own chat model sends them."""
    return cast("list[Message]", list(Converter.items_to_messages(items)))


def _answer_messages(asked: list[TResponseInputItem], response: ModelResponse) -> list[Message]:
    """The answer as the next request will show it; empty if that changes what was asked."""
    before = _messages(asked)
    after = _messages([*asked, *response.to_input_items()])
    return after[len(before) :] if after[: len(before)] == before else []


def _completion_id(output: list[TResponseOutputItem]) -> str | None:
    """The ``id`` of the chat completion that these items were made of."""
    for item in output:
        # A field beside the API's, which the SDK gives the items that its chat model makes.
        data = getattr(item, "provider_data", None)
        if isinstance(data, dict) and isinstance(data.get("response_id"), str):
            return cast("str", data["response_id"])
    return None
