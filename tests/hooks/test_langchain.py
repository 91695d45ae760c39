"""With LangChain's own agents and graphs, and its own scripted chat model."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool, tool
from recorder import Recorder

from toolgap.hooks.langchain import ToolgapCallbackHandler, ToolgapMiddleware
from toolgap.hooks.restores import Restores


class Script(GenericFakeChatModel):
    """LangChain's, which only cannot take tools."""

    def bind_tools(
        self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        return self


def calling(*calls: str) -> AIMessage:
    tool_calls = [{"id": call, "name": "look", "args": {}} for call in calls]
    return AIMessage("", tool_calls=tool_calls, response_metadata={"id": "completion"})


def script(*messages: AIMessage) -> Script:
    return Script(messages=iter([*messages, AIMessage("done")]))


def look_after(restores: Restores) -> BaseTool:
    @tool
    def look() -> str:
        """Look."""
        assert restores.settle()
        return "seen"

    return look


@tool
def fail() -> str:
    """Fail."""
    raise ValueError("the tool's own")


ASK: Any = {"messages": [{"role": "user", "content": "Look."}]}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["middleware", "handler"])
def test_a_turn_submits_and_refreshes_with_the_result(recorder: Recorder, kind: str, mode: str) -> None:
    restores = Restores(recorder.client, strict=True)
    middleware = [ToolgapMiddleware(restores)] if kind == "middleware" else []
    callbacks = [ToolgapCallbackHandler(restores)] if kind == "handler" else []
    agent = create_agent(
        script(calling("c")), [look_after(restores)], system_prompt="Be brief.", middleware=middleware
    )
    config: Any = {"callbacks": callbacks}
    state = agent.invoke(ASK, config) if mode == "sync" else asyncio.run(agent.ainvoke(ASK, config))
    restores.settle()
    assert state["messages"][-1].content == "done"
    assert recorder.submits[0]["request_id"] == "completion"
    for submit in recorder.submits[1:]:
        roles = [message["role"] for message in submit["messages"]]
        assert roles == ["system", "user", "assistant", "tool"]
        assert submit["messages"][-1]["content"] == "seen"
    restores.close()


@pytest.mark.parametrize("kind", ["middleware", "handler"])
def test_a_tool_that_fails_raises_its_own_error(recorder: Recorder, kind: str) -> None:
    restores = Restores(recorder.client, strict=True)
    middleware = [ToolgapMiddleware(restores)] if kind == "middleware" else []
    config: Any = {"callbacks": [ToolgapCallbackHandler(restores)] if kind == "handler" else []}
    message = AIMessage("", tool_calls=[{"id": "c", "name": "fail", "args": {}}])
    agent = create_agent(script(message), [fail], middleware=middleware)
    with pytest.raises(ValueError, match="the tool's own"):
        agent.invoke(ASK, config)
    restores.close()


def test_an_answer_without_an_id_is_named_by_messages(recorder: Recorder) -> None:
    restores = Restores(recorder.client, strict=True)
    message = AIMessage("", tool_calls=[{"id": "c", "name": "look", "args": {}}])
    agent = create_agent(script(message), [look_after(restores)], middleware=[ToolgapMiddleware(restores)])
    agent.invoke(ASK)
    restores.settle()
    first = recorder.submits[0]
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert first["tools"][0]["function"]["name"] == "look"
    restores.close()


def test_a_server_that_is_not_there_does_not_harm_the_agent() -> None:
    middleware = ToolgapMiddleware("http://127.0.0.1:9")
    agent = create_agent(script(calling("c")), [look_after(middleware.restores)], middleware=[middleware])
    assert agent.invoke(ASK)["messages"][-1].content == "done"
    middleware.restores.close()
