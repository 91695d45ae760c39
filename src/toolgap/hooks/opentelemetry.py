"""A span processor for the GenAI conventions of OpenTelemetry (``pip install 'toolgap[opentelemetry]'``)::

    provider.add_span_processor(ToolgapSpanProcessor("http://127.0.0.1:30000"))

It serves whatever library emits these spans: one of a model's answer that has ``gen_ai.response.id``, then
``execute_tool``. The prefix is named by that id alone, as spans seldom carry messages: SGLang's chat
completions have one that it knows.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from toolgap.client import DEFAULT_URL, Toolgap
from toolgap.hooks.restores import Call, Restores, as_restores
from toolgap.hooks.tool_calls import Answer

OPERATION = "gen_ai.operation.name"
CONVERSATION = "gen_ai.conversation.id"
RESPONSE_ID = "gen_ai.response.id"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
EXECUTE_TOOL = "execute_tool"
INFERENCE = ("chat", "text_completion", "generate_content")


class ToolgapSpanProcessor(SpanProcessor):
    """Restores what a conversation's next request will begin with, while its tools run.

    A conversation is known by ``gen_ai.conversation.id``, else by its trace.

    Args:
        server: Toolgap's URL, a client, or :class:`Restores` that several hooks share.
        **options: Of :class:`Restores`.
    """

    def __init__(self, server: str | Toolgap | Restores = DEFAULT_URL, **options: Any) -> None:
        self.restores = as_restores(server, options)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Submit, if a tool begins."""
        with self.restores.harmless("reading a span"):
            if _is_tool(span):
                self.restores.started(_session(span), Call(_call_id(span), _tool(span)))

    def on_end(self, span: ReadableSpan) -> None:
        """Remember an answer; refresh, if a tool has ended; cancel, if the trace has."""
        with self.restores.harmless("reading a span"):
            attributes = _attributes(span)
            response_id = attributes.get(RESPONSE_ID)
            if _is_tool(span):
                self.restores.ended(_session(span), _call_id(span))
            elif attributes.get(OPERATION) in INFERENCE and isinstance(response_id, str):
                self.restores.answered(_session(span), Answer(request_id=response_id))
            if span.parent is None:
                self.restores.closed(_session(span))

    def shutdown(self) -> None:
        """End every session."""
        self.restores.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until everything has been sent that is to be sent now."""
        return self.restores.settle(timeout_millis / 1000)


def _attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def _is_tool(span: ReadableSpan) -> bool:
    operation = _attributes(span).get(OPERATION)
    # A library may set attributes after the start; the conventions fix the name too.
    return operation == EXECUTE_TOOL or (operation is None and span.name.startswith(f"{EXECUTE_TOOL} "))


def _tool(span: ReadableSpan) -> str:
    return str(_attributes(span).get(TOOL_NAME) or span.name.removeprefix(f"{EXECUTE_TOOL} "))


def _call_id(span: ReadableSpan) -> str:
    # The span's own id: that of the call may come only after the start.
    return f"{span.context.span_id:016x}" if span.context is not None else ""


def _session(span: ReadableSpan) -> str:
    conversation = _attributes(span).get(CONVERSATION)
    trace = f"{span.context.trace_id:032x}" if span.context is not None else ""
    return str(conversation or trace)
