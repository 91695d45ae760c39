import json

import pytest

from toolgap.demo.errors import DemoError
from toolgap.demo.scenario import Conversation, Read, common_prefix_tokens, fit, share_lines
from toolgap.demo.tool import TOOLS

FILES = [("a.py", 10), ("b.py", 5)]
READS = [Read("a.py", 2, "one\ntwo"), Read("b.py", 1, "three")]


def test_tools_that_the_template_does_not_know_stand_in_the_system_message() -> None:
    conversation = Conversation(READS, native_tools=False)
    assert conversation.tools is None
    system = conversation.messages[0]["content"]
    assert all(json.dumps(tool) in system for tool in TOOLS)
    call = conversation.messages[2]["content"]
    assert json.loads(call.split("\n")[1]) == {"name": "read_file", "arguments": {"path": "a.py", "lines": 2}}


def test_tools_that_the_template_knows_go_beside_the_messages() -> None:
    conversation = Conversation(READS, native_tools=True)
    assert conversation.tools is TOOLS
    assert "read_file" not in conversation.messages[0]["content"]
    call = conversation.messages[2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"path": "a.py", "lines": 2}
    assert conversation.messages[3] == {"role": "tool", "tool_call_id": call["id"], "content": "one\ntwo"}


@pytest.mark.parametrize("native_tools", [True, False])
def test_the_continuation_only_appends(native_tools: bool) -> None:
    conversation = Conversation(READS, native_tools=native_tools)
    continued = conversation.continued("FAILED")
    before = conversation.messages
    assert continued[: len(before)] == before
    assert [message["role"] for message in continued[len(before) :]] == ["tool", "user"]
    assert continued[len(before)]["content"] == "FAILED"
    assert before[-1]["role"] == "assistant"
    assert "run_tests" in json.dumps(before[-1])


@pytest.mark.parametrize(
    ("total_lines", "shares"),
    [
        (1, [("a.py", 1)]),
        (10, [("a.py", 10)]),
        (11, [("a.py", 10), ("b.py", 1)]),
        (15, [("a.py", 10), ("b.py", 5)]),
    ],
)
def test_share_lines(total_lines: int, shares: list[tuple[str, int]]) -> None:
    assert share_lines(total_lines, FILES) == shares


def count(conversation: Conversation) -> int:
    """Stands in for a tokenizer: 100 tokens of instructions, 7 a line, 5 a call."""
    return 100 + sum(7 * read.lines + 5 for read in conversation.reads)


@pytest.mark.parametrize("prompt_tokens", [100, 113, 175, 176, 190, 215])
def test_fit_is_the_shortest_that_is_long_enough(prompt_tokens: int) -> None:
    conversation = fit(prompt_tokens, FILES, lambda path, lines: path * lines, count, native_tools=True)
    lines = sum(read.lines for read in conversation.reads)
    assert count(conversation) >= prompt_tokens
    if lines > 1:
        shorter = [Read(path, part, "") for path, part in share_lines(lines - 1, FILES)]
        assert count(Conversation(shorter, native_tools=True)) < prompt_tokens


def test_fit_says_how_long_a_prompt_can_be() -> None:
    with pytest.raises(DemoError, match="of 215 tokens at most, not 216"):
        fit(216, FILES, lambda path, lines: "", count, native_tools=True)


def test_common_prefix() -> None:
    assert common_prefix_tokens([1, 2, 3], [1, 2, 3, 4]) == 3
    assert common_prefix_tokens([1, 2, 3], [1, 5, 3]) == 1
    assert common_prefix_tokens([], [1]) == 0
