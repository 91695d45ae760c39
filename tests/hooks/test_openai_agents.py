"""With the SDK's own runner, and a model that answers from a script."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool
from agents.items import TResponseStreamEvent
from agents.models.chatcmpl_converter import Converter
from openai.types.chat import ChatCompletionMessage
from recorder import Recorder

from toolgap.hooks.openai_agents import ToolgapRunHooks
from toolgap.protocol import State


def calling(*calls: str) -> dict[str, Any]:
    """An assistant's message as a chat completion has it."""
    tool_calls = [
        {"id": call, "type": "function", "function": {"name": "look", "arguments": "{}"}} for call in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


class Script(Model):
    """Answers in turn, made into the SDK's items as its own chat model does."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.asked = 0

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        message = ChatCompletionMessage.model_validate(self.messages[self.asked])
        self.asked += 1
        data = {"model": "m", "response_id": f"completion-{self.asked}"}
        output = Converter.message_to_output_items(message, provider_data=data)
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


@function_tool
async def look() -> str:
    """Look."""
    return "seen"


DONE = {"role": "assistant", "content": "done"}


async def run(recorder: Recorder, agent: Agent[Any]) -> None:
    hooks = ToolgapRunHooks(recorder.client, strict=True)
    await Runner.run(agent, "Look.", hooks=hooks)
    assert await asyncio.to_thread(hooks.restores.settle)
    hooks.restores.close()


class Slow:
    """A tool that ends when what its call submitted has arrived."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    async def __call__(self) -> str:
        await asyncio.to_thread(self.recorder.wait_for_submits, 1)
        return "seen"


def test_a_turn_is_named_by_its_completion_and_refreshed_with_the_result(recorder: Recorder) -> None:
    tool = function_tool(Slow(recorder).__call__, name_override="look", description_override="Look.")
    agent = Agent("a", instructions="Be brief.", model=Script(calling("c"), DONE), tools=[tool])
    asyncio.run(run(recorder, agent))
    first = recorder.submits[0]
    assert first["request_id"] == "completion-1"
    refreshed = [submit for submit in recorder.submits if "messages" in submit]
    for submit in refreshed:
        roles = [message["role"] for message in submit["messages"]]
        assert roles == ["system", "user", "assistant", "tool"]
        assert submit["messages"][0]["content"] == "Be brief."
        assert submit["messages"][-1]["content"] == "seen"
        assert submit["tools"][0]["function"]["name"] == "look"


def test_parallel_calls_share_an_operation(recorder: Recorder) -> None:
    recorder.gate.clear()
    agent = Agent("a", model=Script(calling("c", "d"), DONE), tools=[look])
    hooks = ToolgapRunHooks(recorder.client, strict=True)
    starts: list[str] = []

    class Watching(ToolgapRunHooks):
        async def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            await super().on_llm_end(*args, **kwargs)
            starts.append("answer")

    watching = Watching(hooks.restores)
    asyncio.run(Runner.run(agent, "Look.", hooks=watching))
    recorder.gate.set()
    hooks.restores.settle()
    assert starts == ["answer", "answer"]
    # The first was under way, held by the server; what came after it was taken back by the final output.
    assert len(recorder.submits) <= 1


def test_an_agent_whose_request_is_not_known_is_named_by_the_completion_alone(recorder: Recorder) -> None:
    other = Agent("other", model=Script(DONE))
    tool = function_tool(Slow(recorder).__call__, name_override="look", description_override="Look.")
    agent = Agent("a", model=Script(calling("c"), DONE), tools=[tool], handoffs=[other])
    asyncio.run(run(recorder, agent))
    assert recorder.submits
    assert all(submit["request_id"] == "completion-1" for submit in recorder.submits)


def test_the_final_output_cancels_what_still_reads(recorder: Recorder) -> None:
    recorder.default = State.RESTORING
    tool = function_tool(Slow(recorder).__call__, name_override="look", description_override="Look.")
    agent = Agent("a", model=Script(calling("c"), DONE), tools=[tool])
    asyncio.run(run(recorder, agent))
    assert recorder.submits[0]["operation_id"] in recorder.cancelled


def test_an_agent_that_calls_no_tool_sends_nothing(recorder: Recorder) -> None:
    asyncio.run(run(recorder, Agent("a", model=Script(DONE))))
    assert recorder.commands == []


def test_a_server_that_is_not_there_does_not_harm_the_agent() -> None:
    hooks = ToolgapRunHooks("http://127.0.0.1:9")
    agent = Agent("a", model=Script(calling("c"), DONE), tools=[look])
    result = asyncio.run(Runner.run(agent, "Look.", hooks=hooks))
    assert result.final_output == "done"
    hooks.restores.close()
