"""Bodies of both APIs, part by part, and where parts stand in a rendered prompt."""

from typing import Any

import pytest

from toolgap.prefixes.parts import Kind, canonical, first_difference, locate, parts_of, place_of
from toolgap.protocol import Api

OPENAI: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "question"}, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": "let me look",
            "reasoning_content": "hmm",
            "tool_calls": [{"function": {"name": "find", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
}
ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": "rules"}],
    "messages": [
        {"role": "user", "content": "question"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm"},
                {"type": "tool_use", "name": "find", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "found"}],
        },
    ],
}


def test_parts_of_an_openai_body() -> None:
    assert [(part.path, part.kind) for part in parts_of(OPENAI, Api.OPENAI)] == [
        ("messages[0].content", Kind.SYSTEM),
        ("messages[1].content[0].text", Kind.USER),
        ("messages[1].content[1]", Kind.OTHER),
        ("messages[2].reasoning_content", Kind.REASONING),
        ("messages[2].content", Kind.TEXT),
        ("messages[2].tool_calls[0].function.arguments", Kind.CALL),
        ("messages[3].content", Kind.RESULT),
    ]


def test_parts_of_an_anthropic_body() -> None:
    assert [(part.path, part.kind, part.name) for part in parts_of(ANTHROPIC, Api.ANTHROPIC)] == [
        ("system[0].text", Kind.SYSTEM, ""),
        ("messages[0].content", Kind.USER, ""),
        ("messages[1].content[0].thinking", Kind.REASONING, ""),
        ("messages[1].content[1].input", Kind.CALL, "find"),
        ("messages[2].content[0].content", Kind.RESULT, "c1"),
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}, True),
        ('{"a": 1}', {"a": 1}, True),
        ('{"a": 1}', '{"a": 2}', False),
        ("[1, 2]", "[2, 1]", False),
    ],
)
def test_canonical(one: Any, other: Any, same: bool) -> None:
    assert (canonical(one) == canonical(other)) is same


@pytest.mark.parametrize("value", ["plain text", "3", "{broken", None, 3])
def test_only_objects_and_lists_have_a_canonical_form(value: Any) -> None:
    assert canonical(value) is None


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": 1}, {"a": 2}, "x.a"),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2, "b": 1}}, "x.a"),
        ({"a": 1}, {"a": 1, "b": 2}, "x.b"),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 3}], "x[1].a"),
        (None, {"a": 1}, "x"),
    ],
)
def test_first_difference(one: Any, other: Any, path: str) -> None:
    assert first_difference(one, other, "x") == path


def test_places_in_a_prompt() -> None:
    text = 'TOOLS {"name": "find"} SYS rules USR question ASST hmm find({"a": 1}) RES found ASST'
    tools = [{"name": "find"}]
    body = {
        "messages": [OPENAI["messages"][0], {"role": "user", "content": "question"}, *OPENAI["messages"][2:]]
    }
    spans = locate(text, parts_of(body, Api.OPENAI), tools)
    assert place_of(text.index("rules") + 2, spans) == "messages[0].content"
    assert place_of(text.index("question"), spans) == "messages[1].content"
    assert place_of(text.index("hmm"), spans) == "messages[2].reasoning_content"
    assert place_of(text.index('"a"'), spans) == "messages[2].tool_calls[0].function.arguments"
    assert place_of(text.index("found") + 4, spans) == "messages[3].content"
    assert place_of(text.index('"find"') + 1, spans) == "tools[0]"
    assert place_of(len(text) - 1, spans) == "after messages[3].content"
    assert place_of(0, spans) == "before tools[0]"
    assert place_of(text.index("USR"), spans) == "between messages[0].content and messages[1].content"
    assert place_of(3, []) == "the prompt"
