"""With LiteLLM itself, and its own mock answers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import litellm
import pytest
from recorder import Recorder

from toolgap.hooks.litellm import ToolgapLogger

# Of LiteLLM's own models, as they are imported and as they print a server's answer.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS: Any = [{"type": "function", "function": {"name": "look"}}]
ASKED: list[Any] = [{"role": "user", "content": "Look."}]


@pytest.fixture
def logger(recorder: Recorder) -> Iterator[ToolgapLogger]:
    logger = ToolgapLogger(recorder.client, strict=True)
    litellm.callbacks = [logger]
    yield logger
    # It keeps loggers in several lists, and takes only one of a class.
    litellm.logging_callback_manager._reset_all_callbacks()  # type: ignore[no-untyped-call]
    logger.restores.close()


def ask(messages: list[Any], **kwargs: Any) -> Any:
    return litellm.completion("openai/m", messages, api_key="none", tools=TOOLS, **kwargs)


def test_an_answer_that_calls_submits_and_its_end_refreshes(
    recorder: Recorder, logger: ToolgapLogger
) -> None:
    response = ask(ASKED, mock_tool_calls=[CALL])
    recorder.wait_for_submits(1)
    assert recorder.submits[0]["request_id"] == response.id
    logger.tool_ended("c", "seen")
    recorder.wait_for_submits(2)
    refreshed = recorder.submits[1]
    assert [message["role"] for message in refreshed["messages"]] == ["user", "assistant", "tool"]
    assert refreshed["tools"] == TOOLS


def test_the_next_request_ends_its_calls(recorder: Recorder, logger: ToolgapLogger) -> None:
    response = ask(ASKED, mock_tool_calls=[CALL])
    recorder.wait_for_submits(1)
    message = response.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    ask([*ASKED, message, result], mock_response="done")
    logger.restores.settle()
    assert all(submit["request_id"] == response.id for submit in recorder.submits)


def test_async_answers_submit_too(recorder: Recorder, logger: ToolgapLogger) -> None:
    async def main() -> None:
        await litellm.acompletion("openai/m", ASKED, api_key="none", tools=TOOLS, mock_tool_calls=[CALL])
        await asyncio.to_thread(recorder.wait_for_submits, 1)

    asyncio.run(main())


def test_an_answer_without_calls_sends_nothing(recorder: Recorder, logger: ToolgapLogger) -> None:
    logger.log_success_event({"messages": ASKED}, ask(ASKED, mock_response="done"), None, None)
    logger.restores.settle()
    assert recorder.commands == []


def test_what_is_no_completion_is_ignored(recorder: Recorder, logger: ToolgapLogger) -> None:
    logger.log_success_event({}, object(), None, None)
    logger.log_success_event({"messages": "x"}, None, None, None)
    logger.log_pre_api_call("m", None, {})
    logger.tool_ended("unknown", "seen")
    logger.restores.settle()
    assert recorder.commands == []
