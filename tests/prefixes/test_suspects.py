"""Differences between requests, each by its name; whether it matters is for a rendering to show."""

from typing import Any

import pytest

from toolgap.prefixes.causes import CAUSES, Cause
from toolgap.prefixes.suspects import Suspect, namespace_change, suspects, with_flag, with_reasoning
from toolgap.protocol import Api

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hello"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"a": 1, "b": 2}'}
ANSWER = {"role": "assistant", "content": "done"}


def call(arguments: Any = '{"a": 1, "b": 2}', **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "function": {"name": "find", "arguments": arguments}}],
        **fields,
    }


def request(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def tool(name: str, *properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in properties}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def only(before: Any, after: Any, answer: Any = None, api: Api = Api.OPENAI) -> Suspect:
    [suspect] = suspects(before, after, api, answer)
    return suspect


def test_every_cause_has_a_meaning_and_a_mend() -> None:
    assert set(CAUSES) == set(Cause)
    assert all(meaning.endswith(".") and mend.endswith(".") for meaning, mend in CAUSES.values())


def test_an_extension_has_no_suspects() -> None:
    before = request(SYSTEM, USER, tools=[tool("find", "a")])
    after = request(SYSTEM, USER, call(), RESULT, tools=[tool("find", "a")])
    assert suspects(before, after, Api.OPENAI, call()) == []


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        ({"model": "a"}, {"model": "b"}, "model"),
        ({"model": "a:lora"}, {"model": "a"}, "model"),
        ({"cache_salt": "a"}, {}, "cache_salt"),
        ({}, {"lora_path": "x"}, "lora_path"),
        ({"extra_key": "a"}, {"extra_key": "b"}, "extra_key"),
    ],
)
def test_namespace(before: Any, after: Any, place: str) -> None:
    change = namespace_change(request(USER, **before), request(USER, **after))
    assert change is not None
    assert (change.cause, change.place) == (Cause.NAMESPACE, place)


def test_a_model_that_is_left_out_is_no_change() -> None:
    assert namespace_change(request(USER, model="a"), request(USER)) is None


def test_options() -> None:
    before = request(USER, chat_template_kwargs={"enable_thinking": True, "x": 1})
    after = request(USER, ANSWER, USER, chat_template_kwargs={"enable_thinking": False, "x": 1})
    suspect = only(before, after)
    assert (suspect.cause, suspect.place) == (
        Cause.TEMPLATE_OPTIONS,
        "chat_template_kwargs.enable_thinking",
    )
    assert suspect.undone["chat_template_kwargs"] == before["chat_template_kwargs"]
    assert (
        "reasoning_effort"
        not in only(request(USER), request(USER, ANSWER, USER, reasoning_effort="low")).undone
    )


@pytest.mark.parametrize(
    ("tools", "cause", "place", "detail"),
    [
        ([tool("a", "x", "y")], Cause.TOOLS, "tools[1]", "removed: 'b'"),
        ([tool("b"), tool("a", "x", "y")], Cause.TOOLS, "tools[0]", "another order"),
        ([tool("a", "x", "y"), tool("b"), tool("c")], Cause.TOOLS, "tools[2]", "added: 'c'"),
        (
            [tool("a", "x"), tool("b")],
            Cause.TOOLS,
            "tools[0].function.parameters.properties.y",
            "was changed",
        ),
        (
            [tool("a", "y", "x"), tool("b")],
            Cause.SCHEMA_ORDER,
            "tools[0].function.parameters.properties",
            "another order",
        ),
        ([], Cause.TOOLS, "tools[0]", "removed: 'a', 'b'"),
    ],
)
def test_tools(tools: list[Any], cause: Cause, place: str, detail: str) -> None:
    ours = [tool("a", "x", "y"), tool("b")]
    suspect = only(request(USER, tools=ours), request(USER, call(), RESULT, tools=tools))
    assert (suspect.cause, suspect.place) == (cause, place)
    assert detail in suspect.detail
    assert suspect.undone["tools"] == ours


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ("It is 2026-11-30T09:15:02Z now.", "It is 2026-11-30T09:16:40Z now.", Cause.NONCE),
        ("Today is 2026-11-30.", "Today is 2026-12-01.", Cause.NONCE),
        ("Time: 09:15:02, be brief", "Time: 09:16:02, be brief", Cause.NONCE),
        ("ts=1795946400 go", "ts=1795946460 go", Cause.NONCE),
        (
            "run 0b7d9f52-1f5e-4b0a-9c55-0c8b2f1f7e11 now",
            "run 5e0c9a6e-8a27-4b39-8a43-3a4bb6e3bfa0 now",
            Cause.NONCE,
        ),
        ("id: 9f8e7d6c5b4a", "id: 0a1b2c3d4e5f", Cause.NONCE),
        ("You have 3 files.", "You have 4 files.", Cause.SYSTEM_PROMPT),
        ("Be brief.", "Be thorough.", Cause.SYSTEM_PROMPT),
        ("Be brief. 2026-11-30", "Be thorough. 2026-12-01", Cause.SYSTEM_PROMPT),
        ("Be brief.", "Be brief. Today is 2026-12-01.", Cause.SYSTEM_PROMPT),
        (
            "x-anthropic-billing-header: cc_version=2.1.36; cch=1a2b3;\nYou are an agent.",
            "x-anthropic-billing-header: cc_version=2.1.36; cch=9f8e7;\nYou are an agent.",
            Cause.BILLING_HEADER,
        ),
        (
            "x-anthropic-billing-header: cch=1a2b3;\nYou are an agent.",
            "x-anthropic-billing-header: cch=9f8e7;\nYou are an assistant.",
            Cause.SYSTEM_PROMPT,
        ),
    ],
)
def test_system_prompts(one: str, other: str, cause: Cause) -> None:
    suspect = only(
        request({"role": "system", "content": one}, USER),
        request({"role": "system", "content": other}, USER, ANSWER, USER),
    )
    assert (suspect.cause, suspect.place) == (cause, "messages[0].content")
    assert suspect.undone["messages"][0]["content"] == one
    of_claude = only(request(USER, system=one), request(USER, ANSWER, USER, system=other), api=Api.ANTHROPIC)
    assert (of_claude.cause, of_claude.place) == (cause, "system")


@pytest.mark.parametrize("known", ["answer", "history"])
@pytest.mark.parametrize(
    ("one", "other", "cause", "place"),
    [
        (
            call(),
            call('{"b": 2, "a": 1}'),
            Cause.ARGUMENTS,
            "messages[1].tool_calls[0].function.arguments",
        ),
        (call(), call('{"a": 9}'), Cause.EDITED, "messages[1].tool_calls[0].function.arguments"),
        (
            call(reasoning_content="hmm"),
            call(),
            Cause.REASONING_NOT_SENT,
            "messages[1].reasoning_content",
        ),
        (
            call(reasoning_content="hmm"),
            call(reasoning="hmm"),
            Cause.REASONING_NOT_SENT,
            "messages[1].reasoning",
        ),
        (ANSWER, {**ANSWER, "content": "finished"}, Cause.EDITED, "messages[1].content"),
        (ANSWER, call(), Cause.EDITED, "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_answers(one: Any, other: Any, cause: Cause, place: str, known: str) -> None:
    if known == "answer":
        suspect = only(request(USER), request(USER, other, RESULT), answer=one)
    else:
        suspect = only(request(USER, one, RESULT), request(USER, other, RESULT, ANSWER, USER))
    assert (suspect.cause, suspect.place) == (cause, place)
    assert suspect.undone["messages"][1] == one


def test_results() -> None:
    other = {**RESULT, "content": '{"b": 2, "a": 1}'}
    suspect = only(request(USER, call(), RESULT), request(USER, call(), other, ANSWER, USER))
    assert (suspect.cause, suspect.place) == (Cause.RESULTS, "messages[2].content")
    edited = {**RESULT, "content": "[cleared]"}
    suspect = only(request(USER, call(), RESULT), request(USER, call(), edited, ANSWER, USER))
    assert (suspect.cause, suspect.place) == (Cause.EDITED, "messages[2].content")


def test_results_swapped() -> None:
    second = {"role": "tool", "tool_call_id": "c2", "content": "x"}
    before = request(USER, call(), RESULT, second)
    suspect = only(before, request(USER, call(), second, RESULT, ANSWER, USER))
    assert (suspect.cause, suspect.place) == (Cause.RESULTS, "messages[2]")
    assert suspect.undone["messages"] == [*before["messages"], ANSWER, USER]


@pytest.mark.parametrize(
    ("after", "place"),
    [
        ([SYSTEM, {"role": "user", "content": "So far: hello."}], "messages[2]"),
        ([SYSTEM, ANSWER, USER], "messages[1]"),
        ([SYSTEM, USER, call(), RESULT], "messages[3]"),
    ],
)
def test_compaction(after: list[Any], place: str) -> None:
    before = request(SYSTEM, USER, call(), RESULT)
    suspect = only(before, request(*after))
    assert (suspect.cause, suspect.place) == (Cause.COMPACTED, place)


def test_every_difference_is_a_suspect() -> None:
    before = request(SYSTEM, USER, call(), RESULT, tools=[tool("a")])
    after = request(
        {**SYSTEM, "content": "Be polite."},
        USER,
        call('{"b": 2, "a": 1}'),
        RESULT,
        ANSWER,
        USER,
        tools=[tool("b")],
    )
    assert [suspect.cause for suspect in suspects(before, after, Api.OPENAI, None)] == [
        Cause.TOOLS,
        Cause.SYSTEM_PROMPT,
        Cause.ARGUMENTS,
    ]


def test_reasoning_put_back() -> None:
    after = request(USER, call(), RESULT)
    restored = with_reasoning(after, 1, Api.OPENAI, "hmm")
    assert restored is not None
    assert restored["messages"][1]["reasoning_content"] == "hmm"
    assert "reasoning_content" not in after["messages"][1]
    claude = with_reasoning(request(USER, ANSWER), 1, Api.ANTHROPIC, "hmm")
    assert claude is not None
    assert [block["type"] for block in claude["messages"][1]["content"]] == ["thinking", "text"]
    assert with_reasoning(restored, 1, Api.OPENAI, "hmm") is None
    assert with_reasoning(after, 0, Api.OPENAI, "hmm") is None
    assert with_reasoning(after, 9, Api.OPENAI, "hmm") is None


def test_flag() -> None:
    before = request(USER, chat_template_kwargs={"a": 1})
    assert with_flag(before, "clear_thinking", False)["chat_template_kwargs"] == {
        "a": 1,
        "clear_thinking": False,
    }
    assert before["chat_template_kwargs"] == {"a": 1}
