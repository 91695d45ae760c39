"""With OpenTelemetry's own tracer."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer
from recorder import Recorder

from toolgap.hooks.opentelemetry import ToolgapSpanProcessor
from toolgap.protocol import State

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.response.id": "completion"}
TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}


@pytest.fixture
def processor(recorder: Recorder) -> Iterator[ToolgapSpanProcessor]:
    processor = ToolgapSpanProcessor(recorder.client, strict=True)
    yield processor
    processor.shutdown()


@pytest.fixture
def tracer(processor: ToolgapSpanProcessor) -> Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("test")


def test_a_tools_span_submits_by_the_answers_id_and_refreshes(
    recorder: Recorder, processor: ToolgapSpanProcessor, tracer: Tracer
) -> None:
    with tracer.start_as_current_span("invoke_agent"):
        with tracer.start_as_current_span("chat m", attributes=CHAT):
            pass
        with tracer.start_as_current_span("execute_tool look", attributes=TOOL):
            assert processor.force_flush()
            assert [submit["request_id"] for submit in recorder.submits] == ["completion"]
        assert processor.force_flush()
        assert len(recorder.submits) == 2


def test_a_span_is_known_by_its_name_before_its_attributes(
    recorder: Recorder, processor: ToolgapSpanProcessor, tracer: Tracer
) -> None:
    with tracer.start_as_current_span("invoke_agent"):
        with tracer.start_as_current_span("chat m", attributes=CHAT):
            pass
        with tracer.start_as_current_span("execute_tool look"):
            processor.force_flush()
            assert len(recorder.submits) == 1


def test_the_end_of_the_trace_cancels(
    recorder: Recorder, processor: ToolgapSpanProcessor, tracer: Tracer
) -> None:
    recorder.default = State.RESTORING
    with tracer.start_as_current_span("invoke_agent"):
        with tracer.start_as_current_span("chat m", attributes=CHAT):
            pass
        with tracer.start_as_current_span("execute_tool look", attributes=TOOL):
            processor.force_flush()
    processor.force_flush()
    assert recorder.submits[0]["operation_id"] in recorder.cancelled


def test_traces_of_one_conversation_are_one_session(
    recorder: Recorder, processor: ToolgapSpanProcessor, tracer: Tracer
) -> None:
    conversation = {"gen_ai.conversation.id": "t"}
    with tracer.start_as_current_span("invoke_agent"):
        with tracer.start_as_current_span("chat m", attributes={**CHAT, **conversation}):
            pass
        with tracer.start_as_current_span("execute_tool look", attributes={**TOOL, **conversation}):
            processor.force_flush()
            assert len(recorder.submits) == 1


def test_other_spans_and_tools_without_an_answer_send_nothing(
    recorder: Recorder, processor: ToolgapSpanProcessor, tracer: Tracer
) -> None:
    with (
        tracer.start_as_current_span("GET /"),
        tracer.start_as_current_span("execute_tool look", attributes=TOOL),
    ):
        pass
    processor.force_flush()
    assert recorder.commands == []
