"""What the gateway sees of an answer names the beginning of the next prompt, for all four APIs on a real server."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import PAGE, Server

from toolgap.cpu.tiny import SPECIAL_TOKENS, build_tiny_model
from toolgap.gateway.watch import ROUTES, Seen, Watch, asked
from toolgap.hooks.tool_calls import Submit, ToolCalls

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS, MESSAGES, RESPONSES = ROUTES
Body = dict[str, Any]

LONG = "Look after this file, and tell what is in it. " * 6
PARAMETERS: Body = {"type": "object", "const": {}}
"""A grammar of one text: with any other the model may write blanks without end."""
NAME = "read_one_of_the_files"
"""As long as this, since SGLang leaves a part of a stop string standing if its 50th token is within that."""
TOOL: Body = {"name": NAME, "description": "It can read.", "strict": True}
CALLED = "</tool_call>"
SAMPLING: Body = {"temperature": 0, "max_tokens": 200}
QUESTION: Body = {"role": "user", "content": LONG}
REQUESTS: dict[str, Body] = {
    CHAT: {
        **SAMPLING,
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}],
        "tool_choice": "required",
        "stop": CALLED,
    },
    COMPLETIONS: {
        **SAMPLING,
        "prompt": LONG,
        "regex": r'<tool_call>\{"name": "' + NAME + r'", "arguments": \{\}\}</tool_call>',
        "stop": CALLED,
    },
    MESSAGES: {
        **SAMPLING,
        "messages": [QUESTION],
        "tools": [{**TOOL, "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any"},
        "stop_sequences": [CALLED],
    },
    RESPONSES: {
        "temperature": 0,
        "max_output_tokens": 200,
        "input": [QUESTION],
        "tools": [{"type": "function", **TOOL, "parameters": PARAMETERS}],
        "tool_choice": "required",
        "stop": CALLED,
    },
}


SHORT: dict[str, Body] = {
    **{path: {"max_tokens": 1} for path in (CHAT, COMPLETIONS, MESSAGES)},
    # SGLang takes two off.
    RESPONSES: {"max_output_tokens": 3},
}
"""Nobody needs the continuation's answer."""


def go_on_chat(request: Body, seen: Seen) -> Body:
    result = {"role": "tool", "tool_call_id": seen.calls[0].id, "content": "nothing"}
    return {**request, "messages": [*request["messages"], *seen.answer.messages, result]}


def go_on_text(request: Body, _seen: Seen) -> Body:
    answer = f'<tool_call>{{"name": "{NAME}", "arguments": {{}}}}</tool_call>'
    return {**request, "prompt": f"{request['prompt']}{answer}\n<tool_response>"}


def go_on_messages(request: Body, seen: Seen) -> Body:
    block = {"type": "tool_result", "tool_use_id": seen.calls[0].id, "content": "nothing"}
    messages = [*request["messages"], *seen.answer.messages, {"role": "user", "content": [block]}]
    return {**request, "messages": messages}


def output_of(seen: Seen) -> Body:
    return {"type": "function_call_output", "call_id": seen.calls[0].id, "output": "nothing"}


def go_on_items(request: Body, seen: Seen) -> Body:
    call = {
        "type": "function_call",
        "call_id": seen.calls[0].id,
        "name": NAME,
        "arguments": "{}",
    }
    return {**request, "input": [*request["input"], call, output_of(seen)]}


def go_on_after(request: Body, seen: Seen) -> Body:
    return {**request, "input": [output_of(seen)], "previous_response_id": seen.answer_id}


GO_ON: list[tuple[str, Callable[[Body, Seen], Body]]] = [
    (CHAT, go_on_chat),
    (COMPLETIONS, go_on_text),
    (MESSAGES, go_on_messages),
    (RESPONSES, go_on_items),
    (RESPONSES, go_on_after),
]


@pytest.fixture(scope="module")
def names_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model is made to call a tool, and to write it as the template shows it afterwards."""
    folder = tmp_path_factory.mktemp("names")
    # Bytes are the only tokens, so that a text has one tokenization, whoever writes it.
    model = build_tiny_model(folder / "tiny", vocabulary=len(SPECIAL_TOKENS) + 256)
    own = (Path(__file__).parent.parent / "templates" / "qwen2.5.jinja").read_text(encoding="utf-8")
    # What SGLang's grammar of Hermes' calls makes a model write.
    for template, written in (
        (r"""<tool_call>\n{"name": "' }}""", """<tool_call>{"name":"' }}"""),
        (""", "arguments": ' }}""", """, "arguments":' }}"""),
        (r"""}\n</tool_call>' }}""", """}</tool_call>' }}"""),
    ):
        assert template in own
        own = own.replace(template, written)
    (folder / "template.jinja").write_text(own, encoding="utf-8")
    arguments = [
        *("--chat-template", str(folder / "template.jinja"), "--tool-call-parser", "hermes"),
        "--enable-response-store",
    ]
    with Server(model, folder / "server", arguments=arguments) as server:
        yield server


@pytest.fixture
def names(names_server: Server) -> Iterator[Server]:
    with names_server.left_as_found():
        yield names_server


def watched(server: Server, path: str, body: Body) -> Seen:
    """What the gateway sees of a request and its answer."""
    request = asked(path, {}, msgspec.json.encode(body))
    assert request is not None
    with server.http.stream("POST", path, json=body) as reply:
        watch = Watch(request, reply.status_code, {k.lower(): v for k, v in reply.headers.items()})
        for chunk in reply.iter_raw():
            watch.feed(chunk, time.time())
        assert reply.status_code == 200, watch
    seen = watch.ended(time.time())
    assert seen is not None
    return seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "go_on"), GO_ON, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_seen_of_an_answer_names_the_beginning_of_the_next_prompt(
    names: Server, path: str, go_on: Callable[[Body, Seen], Body], *, stream: bool
) -> None:
    if path == RESPONSES and importlib.util.find_spec("openai_harmony") is None:
        pytest.skip("SGLang serves no /v1/responses here: openai-harmony is not installed")
    model = names.http.get("/v1/models").json()["data"][0]["id"]
    request = {"model": model, "stream": stream, **REQUESTS[path]}
    seen = watched(names, path, request)
    assert [call.tool for call in seen.calls] == [NAME]
    assert seen.calling_s is not None

    names.flush()
    (step,) = ToolCalls("names").answered(seen.answer)
    assert isinstance(step, Submit)
    operation = names.toolgap.submit(**step.names[0], force=True)
    assert operation.expected_tokens is not None
    assert operation.expected_tokens > 40
    # Most of the answer as well; what the template puts behind it was never computed.
    assert operation.stable_tokens is not None
    inserted = names.ended(operation.operation_id).inserted_tokens
    assert inserted > operation.stable_tokens + PAGE
    sent = watched(names, path, {**go_on(request, seen), **SHORT[path]})
    assert sent.usage.prompt_tokens is None or sent.usage.prompt_tokens > operation.requested_tokens
    after = names.toolgap.status(operation.operation_id)
    assert (after.matched_tokens, after.divergence) == (after.requested_tokens, None)
    assert after.used_tokens == inserted
