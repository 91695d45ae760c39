"""Prefixes that are named by messages or by a request: the continuation's own tokens, whatever the template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import PAGE, Prompt, Server

from toolgap.client import ToolgapError
from toolgap.engineclient import lines_of
from toolgap.protocol import Api, Code, OperationStatus, Reason, Resolved, State

pytestmark = pytest.mark.engine

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent.parent / "templates").glob("*.jinja"))
}
SYSTEM: dict[str, Any] = {"role": "system", "content": "You look after files. " * 12}
QUESTION: dict[str, Any] = {"role": "user", "content": "Which files are here, and how large are they? " * 4}
RESULTS = ["3 files", "\n\nnothing", '{"files": ["a", "b"]}', "  indented", "1", "ends with a newline\n"]
NAMES = ("list_files", "read_file")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}},
    "required": ["path"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"It can {name}.", "parameters": PARAMETERS},
    }
    for name in NAMES
]


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


ANSWER: dict[str, Any] = {
    "role": "assistant",
    "content": "I will look.",
    "tool_calls": [call(1, "list_files", path="/tmp", depth=1)],
}
TWO_CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call(1, "list_files", path="/"), call(2, "read_file", path="/a")],
}


@pytest.fixture(scope="module")
def chat_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that lets a request bring its chat template, so that one serves for all of them."""
    own = Path(__file__).parent.parent / "templates" / "qwen3.jinja"
    arguments = ["--trust-request-chat-template", "--chat-template", str(own), "--tool-call-parser", "qwen25"]
    with Server(model, tmp_path_factory.mktemp("chat"), arguments=arguments) as server:
        yield server


@pytest.fixture
def chat(chat_server: Server) -> Iterator[Server]:
    with chat_server.left_as_found():
        yield chat_server


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"chat_template": TEMPLATES[request.param]}


Messages = list[dict[str, Any]]


def complete(server: Server, messages: Messages, **fields: Any) -> dict[str, Any]:
    """One request to SGLang's chat route."""
    reply = server.http.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, **fields},
    )
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def prompt_ids(server: Server, messages: Messages, **fields: Any) -> list[int]:
    """What SGLang's chat route gave its scheduler for such a request."""
    recorded = server.toolgap.resolve(request_id=complete(server, messages, **fields)["id"])
    assert recorded.stable_tokens is not None
    return recorded.token_ids[: recorded.stable_tokens]


def check_begins(whole: list[int], part: Resolved) -> None:
    assert whole[: len(part.token_ids)] == part.token_ids


# ---- messages ----


def test_a_whole_prompt_has_the_chat_routes_own_tokens(chat: Server, template: dict[str, Any]) -> None:
    options: Any = {"chat_template_kwargs": template, "tools": TOOLS}
    for messages in ([QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION, ANSWER, result(1, "3 files")]):
        named = chat.toolgap.resolve(messages=messages, **options)
        assert named.token_ids == prompt_ids(chat, messages, **options)
        assert (named.stable_tokens, named.expected_tokens) == (len(named.token_ids), 0)


def test_every_continuation_begins_with_what_the_answer_so_far_names(
    chat: Server, template: dict[str, Any]
) -> None:
    options: Any = {"chat_template_kwargs": template, "tools": TOOLS}
    asked = [SYSTEM, QUESTION]
    named = chat.toolgap.resolve(messages=[*asked, ANSWER], **options)
    before = prompt_ids(chat, asked, **options)
    assert named.stable_tokens is not None
    assert before[: named.stable_tokens] == named.token_ids[: named.stable_tokens]
    # The generation prompt may not be a part of the history, but what was asked is.
    assert named.stable_tokens > len(before) - 12
    assert named.expected_tokens is not None
    assert named.expected_tokens > 10
    afterwards = [prompt_ids(chat, [*asked, ANSWER, result(1, text)], **options) for text in RESULTS]
    for prompt in afterwards:
        check_begins(prompt, named)
    # It is as long as that can be, but for a few tokens with which a result may merge.
    shared = next(i for i, tokens in enumerate(zip(*afterwards, strict=False)) if len(set(tokens)) > 1)
    assert shared - len(named.token_ids) <= 3


def test_results_that_are_there_are_a_part_of_it(chat: Server, template: dict[str, Any]) -> None:
    options: Any = {"chat_template_kwargs": template, "tools": TOOLS}
    asked = [QUESTION, ANSWER, result(1, "a and b"), {"role": "user", "content": "Go on."}]
    none = chat.toolgap.resolve(messages=[*asked, TWO_CALLS], **options)
    one = chat.toolgap.resolve(messages=[*asked, TWO_CALLS, result(1, "a and b " * 20)], **options)
    assert len(one.token_ids) > len(none.token_ids) + 20
    assert one.stable_tokens == none.stable_tokens
    for text in RESULTS:
        messages = [*asked, TWO_CALLS, result(1, "a and b " * 20), result(2, text)]
        check_begins(prompt_ids(chat, messages, **options), one)


def test_an_answer_without_tool_calls_goes_on_with_the_user(chat: Server) -> None:
    asked = [SYSTEM, QUESTION]
    named = chat.toolgap.resolve(messages=[*asked, {"role": "assistant", "content": "Two files."}])
    for text in RESULTS:
        messages = [*asked, {"role": "assistant", "content": "Two files."}, {"role": "user", "content": text}]
        check_begins(prompt_ids(chat, messages), named)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "smollm3", "glm-4.6", "deepseek-v3.1"])
def test_options_that_change_the_prompt_change_the_prefix(chat: Server, name: str, thinking: bool) -> None:
    kwargs = {"chat_template": TEMPLATES[name], "enable_thinking": thinking, "thinking": thinking}
    choices: list[dict[str, Any]] = [{}, {"tool_choice": "none"}]
    for choice in choices:
        fields: Any = {"chat_template_kwargs": kwargs, **choice}
        named = chat.toolgap.resolve(messages=[SYSTEM, QUESTION], tools=TOOLS, **fields)
        assert named.token_ids == prompt_ids(chat, [SYSTEM, QUESTION], tools=TOOLS, **fields)
    effort = "high" if thinking else "none"
    options: Any = {"chat_template_kwargs": {"chat_template": TEMPLATES[name]}, "reasoning_effort": effort}
    named = chat.toolgap.resolve(messages=[QUESTION], **options)
    assert named.token_ids == prompt_ids(chat, [QUESTION], **options)


def test_a_final_message_that_is_continued_is_a_whole_prompt(chat: Server) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "There are"}]
    named = chat.toolgap.resolve(messages=messages, continue_final_message=True)
    assert named.token_ids == prompt_ids(chat, messages, continue_final_message=True)


# ---- the Anthropic form ----

ANTHROPIC_TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": "It can.", "input_schema": PARAMETERS} for name in NAMES
]
TOOL_USES: dict[str, Any] = {
    "role": "assistant",
    "content": [
        {"type": "text", "text": "I will look."},
        {"type": "tool_use", "id": "toolu_1", "name": "list_files", "input": {"path": "/"}},
        {"type": "tool_use", "id": "toolu_2", "name": "read_file", "input": {"path": "/a"}},
    ],
}


def tool_result(number: int, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": content}


@pytest.mark.parametrize("given", [0, 1])
def test_the_anthropic_route_serves_the_same_prompt(chat: Server, given: int) -> None:
    fields: Any = {"system": [{"type": "text", "text": SYSTEM["content"]}], "tools": ANTHROPIC_TOOLS}
    results = [tool_result(1, "3 files: a, b and c " * 9)][:given]
    so_far: list[dict[str, Any]] = [
        QUESTION,
        TOOL_USES,
        *([{"role": "user", "content": results}] if results else []),
    ]
    operation = chat.toolgap.submit(messages=so_far, api=Api.ANTHROPIC, **fields)
    assert operation.expected_tokens is not None
    assert operation.expected_tokens > 16
    assert operation.stable_tokens is not None
    assert operation.stable_tokens > 50
    chat.ended(operation.operation_id)
    rest = [tool_result(i, "nothing") for i in (1, 2)][given:]
    messages = [QUESTION, TOOL_USES, {"role": "user", "content": [*results, *rest]}]
    reply = chat.http.post(
        "/v1/messages", json={"model": "m", "max_tokens": 2, "messages": messages, **fields}
    )
    assert reply.status_code == 200, reply.text
    after = chat.toolgap.status(operation.operation_id)
    assert after.matched_tokens == after.requested_tokens
    assert after.first_divergent_token is None


# ---- request_id ----


def test_a_request_names_its_prompt_and_its_answer(chat: Server) -> None:
    reply = chat.http.post(
        "/generate",
        json={
            "input_ids": list(range(200, 500)),
            "rid": "my-request",
            "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True},
        },
    ).json()
    named = chat.toolgap.resolve(request_id="my-request")
    assert named.token_ids == [*range(200, 500), *reply["output_ids"]]
    assert (named.stable_tokens, named.expected_tokens) == (300, 20)
    chat.flush()
    operation = chat.toolgap.submit(request_id="my-request")
    assert (operation.stable_tokens, operation.expected_tokens) == (300, 20)
    assert chat.ended(operation.operation_id).state is State.PARTIAL
    assert chat.generate([*named.token_ids, 7]).storage_tokens == 0
    after = chat.toolgap.status(operation.operation_id)
    # The last token's KV was never computed.
    assert after.used_tokens == after.inserted_tokens == 19 * PAGE
    assert (after.matched_tokens, after.divergence) == (320, None)


def test_a_streamed_completion_names_itself_by_its_id(chat: Server) -> None:
    body = {"model": "m", "messages": [SYSTEM, QUESTION], "max_tokens": 5, "stream": True}
    with chat.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in lines_of(stream.iter_bytes())
            if line.startswith("data: {")
        ]
    [request_id] = {chunk["id"] for chunk in chunks}
    named = chat.toolgap.resolve(request_id=request_id)
    assert named.token_ids[: named.stable_tokens] == prompt_ids(chat, [SYSTEM, QUESTION])


def test_a_requests_namespace_comes_with_it(chat: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    chat.generate(prefix, rid="salted", extra_key="tenant", cache_salt="salt")
    chat.flush()
    operation = chat.toolgap.submit(request_id="salted")
    assert chat.ended(operation.operation_id).inserted_tokens == 20 * PAGE
    assert chat.generate([*prefix, 7]).sources == (0, 0, 0)
    assert chat.generate([*prefix, 7], extra_key="tenant", cache_salt="salt").host_tokens == 20 * PAGE


def test_a_request_that_nobody_knows_is_named(chat: Server) -> None:
    for call_it in (chat.toolgap.submit, chat.toolgap.resolve):
        with pytest.raises(ToolgapError) as refused:
            call_it(request_id="never-sent")
        assert (refused.value.status_code, refused.value.error.code) == (404, Code.UNKNOWN_REQUEST)
        assert refused.value.error.field == "request_id"
        assert "never-sent" in str(refused.value)


# ---- refusals ----


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [QUESTION], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [QUESTION], "reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}], "api": "anthropic"}, "messages"),
        ({"messages": [QUESTION], "api": "anthropic", "tools": [{}]}, "tools"),
        ({"messages": [QUESTION, ANSWER | {"tool_calls": [{"id": "a"}]}]}, "messages"),
        ({"messages": [QUESTION], "model": "m:absent"}, "lora_path"),
    ],
)
def test_what_the_chat_route_refuses_is_refused(chat: Server, fields: dict[str, Any], field: str) -> None:
    reply = chat.call(action="submit", **fields)
    error = reply.json()["error"]
    assert (error["code"], error["field"]) in (
        (Code.INVALID_FIELD, field),
        (Code.NOT_SUPPORTED, field),
    ), error
    assert reply.status_code == (400 if error["code"] == Code.INVALID_FIELD else 501)
    assert len(error["message"]) > 20


def test_pictures_are_refused(chat: Server) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    reply = chat.call(action="submit", messages=[{"role": "user", "content": [picture]}])
    assert reply.status_code in (400, 501)
    assert reply.json()["error"]["field"] == "messages"


def test_a_template_in_a_request_is_refused_as_sglang_refuses_it(server: Server) -> None:
    kwargs = {"chat_template": TEMPLATES["qwen3"]}
    reply = server.call(action="resolve", messages=[QUESTION], chat_template_kwargs=kwargs)
    assert reply.status_code == 400
    assert "--trust-request-chat-template" in reply.json()["error"]["message"]


# ---- where the continuation left the prefix ----


def restored(server: Server, prefix: list[int]) -> OperationStatus:
    server.store([*prefix, 5])
    return server.ended(server.toolgap.submit(input_ids=prefix).operation_id)


def test_where_a_continuation_left_the_prefix_is_told(server: Server, prompt: Prompt) -> None:
    prefix, other = prompt(20 * PAGE), prompt(3 * PAGE)
    operation = restored(server, prefix)
    assert (operation.matched_tokens, operation.first_divergent_token) == (None, None)
    server.generate(prompt(4 * PAGE))
    assert server.toolgap.status(operation.operation_id).matched_tokens is None
    server.generate(prefix[: 2 * PAGE] + other)
    server.generate(prefix[: 7 * PAGE + 3] + other)
    server.generate(prefix[: 4 * PAGE] + other)
    status = server.toolgap.status(operation.operation_id)
    assert status.matched_tokens == status.first_divergent_token == 7 * PAGE + 3
    assert status.used_tokens == 7 * PAGE
    assert status.divergence is not None
    assert status.divergence.submitted_ids == prefix[7 * PAGE + 3 :][:12]
    assert status.divergence.prompted_ids == other[:12]
    texts = [
        server.http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": False}).json()["text"]
        for ids in (status.divergence.submitted_ids, status.divergence.prompted_ids)
    ]
    assert [status.divergence.submitted_text, status.divergence.prompted_text] == texts
    [listed] = [s for s in server.toolgap.overview().recent if s.operation_id == operation.operation_id]
    assert listed.divergence == status.divergence
    server.generate([*prefix, 9], tokens=1)
    assert server.toolgap.status(operation.operation_id).used_tokens == 20 * PAGE
    whole = server.toolgap.status(operation.operation_id)
    assert (whole.matched_tokens, whole.first_divergent_token, whole.divergence) == (20 * PAGE, None, None)


def test_a_request_of_another_namespace_is_no_continuation(server: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    operation = restored(server, prefix)
    server.generate([*prefix, 9], cache_salt="other")
    assert server.toolgap.status(operation.operation_id).matched_tokens is None
    server.generate([*prefix, 9])
    assert server.toolgap.status(operation.operation_id).matched_tokens == 20 * PAGE


def test_a_miss_tells_it_as_well(server: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    missed = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert missed.reason is Reason.NOT_IN_STORAGE
    server.generate([*prefix[:-1], 9])
    status = server.toolgap.status(missed.operation_id)
    assert (status.used_tokens, status.first_divergent_token) == (0, 20 * PAGE - 1)
