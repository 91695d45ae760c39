import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.gateway.watch import ROUTES, Asked, Seen, Watch, asked
from toolgap.hooks.restores import Call
from toolgap.protocol import Api

CHAT, COMPLETIONS, MESSAGES, RESPONSES = ROUTES
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Run the tests."}
REQUEST = {"model": "m", "messages": [USER], "temperature": 0.5, "cache_salt": "s"}


def chat_chunk(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "r1", "object": "chat.completion.chunk", "choices": [choice], "usage": None}


def call_delta(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


CHAT_STREAM = [
    chat_chunk({"role": "assistant", "content": "", "tool_calls": None}),
    chat_chunk({"reasoning_content": "Hm."}),
    chat_chunk({"content": "I ru"}),
    chat_chunk({"content": "n ü."}),
    chat_chunk(call_delta(0, "c1", "bash", "")),
    chat_chunk(call_delta(0, None, None, '{"a":')),
    chat_chunk(call_delta(0, None, None, " 1}")),
    chat_chunk(call_delta(1, "c2", "read", "{}")),
    chat_chunk({}, "tool_calls"),
    {"id": "r1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
    "[DONE]",
]
CHAT_ANSWER = {
    "role": "assistant",
    "content": "I run ü.",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{}"}},
    ],
}
CHAT_BODY = {
    "id": "r1",
    "choices": [
        {
            "index": 0,
            "message": {**CHAT_ANSWER, "reasoning_content": "Hm."},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}
USE = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {}}
MESSAGES_STREAM = [
    {"type": "message_start", "message": {"id": "msg_1", "content": [], "usage": {"input_tokens": 7}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "."}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "ping"},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "I run."}},
    {"type": "content_block_stop", "index": 1},
    {"type": "content_block_start", "index": 2, "content_block": USE},
    {
        "type": "content_block_delta",
        "index": 2,
        "delta": {"type": "input_json_delta", "partial_json": '{"b": 1,'},
    },
    {
        "type": "content_block_delta",
        "index": 2,
        "delta": {"type": "input_json_delta", "partial_json": '"a":2}'},
    },
    {"type": "content_block_stop", "index": 2},
    {"type": "content_block_start", "index": 3, "content_block": {**USE, "id": "t2"}},
    {"type": "content_block_stop", "index": 3},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]
BLOCKS = [
    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    {"type": "text", "text": "I run."},
    {**USE, "input": {"b": 1, "a": 2}},
    {**USE, "id": "t2"},
]
MESSAGES_BODY = {
    "id": "msg_1",
    "type": "message",
    "content": BLOCKS,
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 7, "output_tokens": 3},
}
ITEMS = [
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
    {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
]
RESPONSES_BODY = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "error": None,
    "output": ITEMS,
    "usage": {"input_tokens": 7, "output_tokens": 3},
}
RESPONSES_STREAM = [
    {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}},
    *(
        {"type": "response.output_item.added", "output_index": i, "item": item}
        for i, item in enumerate(ITEMS)
    ),
    *({"type": "response.output_item.done", "output_index": i, "item": item} for i, item in enumerate(ITEMS)),
    {"type": "response.completed", "response": RESPONSES_BODY},
]
COMPLETIONS_STREAM = [
    {"id": "r1", "choices": [{"index": 0, "text": "a", "finish_reason": None}]},
    {"id": "r1", "choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]},
    {"id": "r1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
    "[DONE]",
]
STREAMS: dict[str, list[Any]] = {
    CHAT: CHAT_STREAM,
    COMPLETIONS: COMPLETIONS_STREAM,
    MESSAGES: MESSAGES_STREAM,
    RESPONSES: RESPONSES_STREAM,
}


def sse(events: list[Any], end: str = "\n") -> bytes:
    lines = []
    for event in events:
        lines += [": a comment", f"data: {event if isinstance(event, str) else json.dumps(event)}", ""]
    return (end.join(lines) + end).encode()


def watch(path: str, *chunks: bytes, request: Any = REQUEST, **kwargs: Any) -> Seen | None:
    headers = kwargs.pop("headers", SSE)
    watching = Watch(Asked(path, request), kwargs.pop("status", 200), headers, **kwargs)
    for number, chunk in enumerate(chunks):
        watching.feed(chunk, float(number))
    return watching.ended(float(len(chunks)))


def told(seen: Seen | None) -> Any:
    """Without the times, which depend on the chunks."""
    return None if seen is None else seen._replace(calling_s=None, whole_s=0.0)


def seen(path: str, events: list[Any], **kwargs: Any) -> Seen:
    result = watch(path, sse(events), **kwargs)
    assert result is not None
    return result


def test_a_chat_completion_with_parallel_calls() -> None:
    result = seen(CHAT, CHAT_STREAM)
    assert result.answer.request_id == "r1"
    assert result.answer.request == {"model": "m", "messages": [USER], "cache_salt": "s"}
    assert list(result.answer.messages) == [CHAT_ANSWER]
    assert list(result.answer.calls) == ["c1", "c2"]
    assert result.calls == (Call("c1", "bash"), Call("c2", "read"))
    assert (result.finish, result.reasoned, result.usage) == ("tool_calls", True, (7, 3))


def test_reasoning_is_shown_again_if_the_client_has_done_so_before() -> None:
    before = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    (message,) = seen(CHAT, CHAT_STREAM, request={"messages": [USER, before, USER]}).answer.messages
    assert message["reasoning_content"] == "Hm."


def test_a_message_with_thinking_and_parallel_tool_uses() -> None:
    result = seen(MESSAGES, MESSAGES_STREAM)
    assert result.answer.request_id is None
    assert result.answer.request.get("api") is Api.ANTHROPIC
    assert list(result.answer.messages) == [{"role": "assistant", "content": BLOCKS}]
    assert list(result.answer.messages[0]["content"][2]["input"]) == ["b", "a"]
    assert result.calls == (Call("t1", "Bash"), Call("t2", "Bash"))
    assert (result.finish, result.answer_id, result.usage) == ("tool_use", "msg_1", (7, 3))


def test_of_a_message_the_part_of_the_prompt_that_was_cached_counts() -> None:
    usage = {"input_tokens": 7, "cache_read_input_tokens": 100, "cache_creation_input_tokens": None}
    start = {"type": "message_start", "message": {"id": "msg_1", "content": [], "usage": usage}}
    assert seen(MESSAGES, [start, *MESSAGES_STREAM[1:]]).usage == (107, 3)
    nothing = {
        "type": "message_start",
        "message": {"id": "msg_1", "content": [], "usage": {"input_tokens": 0}},
    }
    assert seen(MESSAGES, [nothing, *MESSAGES_STREAM[1:]]).usage == (None, 3)


def test_a_response_tells_its_calls_and_is_named_by_its_id() -> None:
    result = seen(RESPONSES, RESPONSES_STREAM, request={"input": "Run the tests."})
    assert result.calls == (Call("c1", "bash"), Call("c2", "read"))
    assert (result.answer.request_id, result.answer.request) == ("resp_1", {})
    assert (result.answer_id, result.reasoned, result.usage) == ("resp_1", True, (7, 3))


def test_a_text_completion_is_named_by_its_id() -> None:
    result = seen(COMPLETIONS, COMPLETIONS_STREAM, request={"prompt": "a"})
    assert (result.answer.request_id, result.answer.request, result.calls) == ("r1", {}, ())
    assert (result.finish, result.usage) == ("stop", (7, 3))


def completion(*pieces: str, **fields: Any) -> list[Any]:
    last = {"index": 0, "text": "", "finish_reason": "stop", **fields}
    return [
        *({"id": "r1", "choices": [{"index": 0, "text": piece, "finish_reason": None}]} for piece in pieces),
        {"id": "r1", "choices": [last]},
        "[DONE]",
    ]


CALLING = ("I run.\n<tool_", "call>", '{"name": "bash", "arguments": {}}', "</tool_call>")


def test_a_text_completion_that_ends_with_a_call_has_it() -> None:
    result = seen(COMPLETIONS, completion(*CALLING), request={"prompt": "a"})
    assert (result.calls, list(result.answer.calls)) == ((Call("r1-0", "bash"),), ["r1-0"])
    watching = Watch(Asked(COMPLETIONS, {}), 200, SSE)
    signs = []
    for event in completion(*CALLING):
        watching.feed(sse([event]), 1.0)
        signs.append(watching.is_calling)
    assert signs[:3] == [False, True, True]
    # What the client stops at is left out of the text, or its end is.
    for part in ("", "</tool_c", "</tool_call>"):
        stopped = seen(COMPLETIONS, completion(*CALLING[:3], part, matched_stop="</tool_call>"))
        assert stopped.calls == result.calls


@pytest.mark.parametrize(
    ("events", "request_fields"),
    [
        (completion(*CALLING, finish_reason="length"), {}),
        (completion(*CALLING, " Done."), {}),
        (completion(*CALLING), {"echo": True}),
        ([{"id": "r1", "choices": [{"index": 1, "text": "b"}]}, *completion(*CALLING)], {}),
        (completion(*CALLING[:3]), {}),
    ],
)
def test_a_text_completion_with_no_certain_call_has_none(
    events: list[Any], request_fields: dict[str, Any]
) -> None:
    result = seen(COMPLETIONS, events, request=request_fields)
    assert (result.calls, result.calling_s) == ((), None)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, CHAT_BODY), (MESSAGES, MESSAGES_BODY), (RESPONSES, RESPONSES_BODY)]
)
def test_an_unstreamed_answer_is_what_the_streamed_one_is(path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    unstreamed = watch(path, data[:10], data[10:], headers=JSON)
    assert told(unstreamed) == told(seen(path, STREAMS[path]))


def test_when_the_call_began_to_leave_and_when_the_answer_was_whole() -> None:
    watching = Watch(Asked(CHAT, REQUEST), 200, SSE)
    signs = []
    for number, event in enumerate(CHAT_STREAM):
        watching.feed(sse([event]), float(number))
        signs.append((watching.is_calling, watching.is_whole))
    result = watching.ended(99.0)
    assert result is not None
    assert (result.calling_s, result.whole_s) == (4.0, 8.0)
    assert signs[3:5] == [(False, False), (True, False)]
    assert signs[8] == (True, True)


@pytest.mark.parametrize("finish", ["length", "content_filter"])
def test_a_cut_answer_has_no_calls_and_nobody_knows_what_is_made_of_it(finish: str) -> None:
    result = seen(CHAT, [*CHAT_STREAM[:8], chat_chunk({}, finish)])
    assert (result.calls, list(result.answer.messages), result.answer.request_id) == ((), [], "r1")


def test_of_several_choices_nobody_knows_which_one_goes_on() -> None:
    result = seen(CHAT, [chat_chunk({"content": "b"}, "stop", index=1), *CHAT_STREAM])
    assert (result.answer.request_id, result.calls, list(result.answer.messages)) == (None, (), [])


def test_calls_without_an_index_go_by_their_ids() -> None:
    events = [
        chat_chunk({"tool_calls": [{"id": "a", "function": {"name": "x", "arguments": "{"}}]}),
        chat_chunk({"tool_calls": [{"function": {"arguments": "}"}}]}),
        chat_chunk({"tool_calls": [{"id": "b", "function": {"name": "y", "arguments": "{}"}}]}, "tool_calls"),
    ]
    (message,) = seen(CHAT, events).answer.messages
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}", "{}"]


@pytest.mark.parametrize(
    ("path", "events"),
    [
        (CHAT, CHAT_STREAM[:8]),
        (CHAT, [{"error": {"message": "no"}}, *CHAT_STREAM]),
        (CHAT, [chat_chunk({"content": 3}), *CHAT_STREAM]),
        (CHAT, ["nonsense", *CHAT_STREAM]),
        (CHAT, [chat_chunk(call_delta(0, None, "x", "{}"), "tool_calls")]),
        (CHAT, [chat_chunk({}, "abort")]),
        (MESSAGES, MESSAGES_STREAM[:-2]),
        (MESSAGES, [*MESSAGES_STREAM[:9], {"type": "error", "error": {}}]),
        (MESSAGES, MESSAGES_STREAM[2:]),
        (MESSAGES, [*MESSAGES_STREAM[:12], *MESSAGES_STREAM[13:]]),
        (RESPONSES, RESPONSES_STREAM[:-1]),
        (RESPONSES, [{"type": "response.failed", "response": {}}]),
    ],
)
def test_what_is_broken_off_or_malformed_is_nothing(path: str, events: list[Any]) -> None:
    assert watch(path, sse(events)) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {**SSE, "content-encoding": "gzip"},
    ],
)
def test_what_cannot_be_read_is_nothing(headers: dict[str, str]) -> None:
    assert watch(CHAT, sse(CHAT_STREAM), headers=headers) is None


def test_a_failure_is_nothing() -> None:
    assert watch(CHAT, sse(CHAT_STREAM), status=500) is None


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_that_is_too_long_passes_unwatched(path: str) -> None:
    assert watch(path, sse(STREAMS[path]), max_bytes=40) is None
    assert watch(path, json.dumps(CHAT_BODY).encode(), headers=JSON, max_bytes=200) is None


def test_deep_json_is_nothing() -> None:
    assert watch(CHAT, b'{"a":' + b"[" * 100_000, headers=JSON) is None
    assert asked(CHAT, JSON, b'{"a":' + b"[" * 100_000) is None


def test_only_readable_requests_of_known_paths_are_watched() -> None:
    assert asked(CHAT, JSON, b'{"messages": []}') == Asked(CHAT, {"messages": []})
    assert asked("/v1/models", JSON, b"{}") is None
    assert asked(CHAT, JSON, b"[]") is None
    assert asked(CHAT, {"content-encoding": "zstd"}, b"{}") is None


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(place % (len(stream) + 1) for place in cuts)})
    return [stream[start:end] for start, end in pairwise(places)]


@given(
    st.sampled_from(list(ROUTES)),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 10_000), max_size=50),
)
def test_neither_chunks_nor_line_ends_matter(path: str, end: str, cuts: list[int]) -> None:
    expected = told(seen(path, STREAMS[path]))
    assert told(watch(path, *cut(sse(STREAMS[path], end), cuts))) == expected


@given(
    path=st.sampled_from(list(ROUTES)),
    headers=st.sampled_from([SSE, JSON]),
    data=st.data(),
    cuts=st.lists(st.integers(0, 10_000), max_size=20),
    max_bytes=st.sampled_from([100, 2000, 1 << 20]),
)
def test_whatever_passes_nothing_is_raised_and_chunks_do_not_matter(
    path: str, headers: dict[str, str], data: st.DataObject, cuts: list[int], max_bytes: int
) -> None:
    stream = bytearray(sse(STREAMS[path]))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(stream) - 1), st.integers(0, 255)), max_size=4)
    ):
        stream[place] = value
    body = data.draw(st.one_of(st.binary(max_size=200), st.just(bytes(stream)), st.just(bytes(stream[7:]))))
    results = [
        watch(path, *chunks, headers=headers, max_bytes=max_bytes) for chunks in ([body], cut(body, cuts))
    ]
    assert told(results[0]) == told(results[1])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def mutated(value: Any, data: st.DataObject) -> Any:
    """The same with one part of it replaced by anything."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: mutated(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(value[place], data), *value[place + 1 :]]
    return data.draw(JSON_VALUES)


@given(path=st.sampled_from(list(ROUTES)), data=st.data(), request=JSON_VALUES)
def test_no_shape_of_an_event_raises(path: str, data: st.DataObject, request: Any) -> None:
    events = list(STREAMS[path])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(events) - 1))
        events[place] = mutated(events[place], data)
    watch(path, sse(events), request={"messages": request})
    watch(path, json.dumps(mutated(CHAT_BODY, data)).encode(), headers=JSON)
