"""What two texts show of why they part."""

from typing import Any

from toolgap.prefixes.causes import Cause
from toolgap.prefixes.evidence import (
    Scene,
    common_length,
    contains,
    dropped_reasoning,
    in_generation_prompt,
    is_harmony,
    is_token_merge,
    text_cause,
    user_arrived,
)
from toolgap.prefixes.parts import parts_of
from toolgap.protocol import Api

USER = {"role": "user", "content": "hello there"}
THOUGHT = {"role": "assistant", "content": "done", "reasoning_content": "let me think about it"}


def scene(text: str, next_text: str, token: str = "", next_token: str = "", **fields: Any) -> Scene:
    made: dict[str, Any] = {
        "offset": common_length(text, next_text),
        "prompt_chars": len(text),
        "parts": [],
        "prompt_messages": 1,
        "roles": ["user"],
    }
    return Scene(text=text, next_text=next_text, token=token, next_token=next_token, **(made | fields))


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_length([1, 2], [1, 2, 3]) == 2
    assert common_length([], [1]) == 0


def test_blanks_do_not_hide_a_part() -> None:
    assert contains("<think>\n one  two\nthree </think>", "one two three\n")
    assert not contains("one three", "one two three")


def test_two_newlines_that_became_one_token() -> None:
    text = "Clear.\n\nAnd warm, with a little wind from the west."
    assert is_token_merge(scene(text, text + "<end>", "\n", "\n\n", offset=6))
    assert text_cause(scene(text, text + "<end>", "\n", "\n\n", offset=6)) is Cause.TOKEN_MERGE


def test_the_end_of_a_prompt_that_merges_with_what_follows() -> None:
    assert is_token_merge(scene("assistant\n", "assistant\n\nSunny", "\n", "\n\n", offset=9))


def test_another_token_before_another_text_is_no_merge() -> None:
    """The first token differs only because the text soon does."""
    assert not is_token_merge(scene("say <think>yes", "say </think>", "<th", "</", offset=4))
    assert not is_token_merge(scene("a word", "a work", "word", "work", offset=2))
    assert not is_token_merge(scene("a", "a b", "", " b", offset=1))
    assert not is_token_merge(scene("a b", "a b", "b", "b", offset=2))


def test_harmony() -> None:
    start = "<|start|>assistant<|channel|>"
    ours = f"{start}analysis<|message|>hmm<|end|>{start}final<|message|>done"
    assert is_harmony(scene(ours, f"{start}final<|message|>done"))
    assert text_cause(scene(ours, f"{start}final<|message|>done")) is Cause.HARMONY
    assert not is_harmony(scene(ours, f"{start}analysis<|message|>another<|end|>"))
    assert not is_harmony(scene("<think>hmm</think>", "done"))


def test_reasoning_that_is_gone() -> None:
    body = {"messages": [USER, THOUGHT, USER]}
    parts = parts_of(body, Api.OPENAI)
    ours = "U: hello there\nA: <think>\nlet me think about it\n</think>\n\ndone\n"
    theirs = "U: hello there\nA: done\nU: more\n"
    gone = dropped_reasoning(scene(ours, theirs, parts=parts, prompt_messages=3))
    assert gone is not None
    assert gone.path == "messages[1].reasoning_content"
    assert dropped_reasoning(scene(ours, ours + "more", parts=parts, prompt_messages=3)) is None


def test_reasoning_that_is_gone_elsewhere_is_not_why() -> None:
    parts = parts_of({"messages": [USER, THOUGHT]}, Api.OPENAI)
    ours = "SYS: one\n" + "x" * 200 + "A: <think>\nlet me think about it\n</think>\n\ndone\n"
    theirs = "SYS: two\n" + "x" * 200 + "A: done\n"
    assert dropped_reasoning(scene(ours, theirs, parts=parts)) is None


def test_a_user_arrives() -> None:
    assert user_arrived(scene("", "", prompt_messages=1, roles=["user", "assistant", "user"]))
    assert not user_arrived(scene("", "", prompt_messages=1, roles=["user", "assistant", "tool"]))


def test_generation_prompt() -> None:
    parts = parts_of({"messages": [USER]}, Api.OPENAI)
    ours = "U: hello there\nA: <think>\n\n</think>\n\n"
    assert in_generation_prompt(scene(ours, "U: hello there\nA: done", parts=parts))
    assert not in_generation_prompt(scene(ours, "U: hello you\nA: done", parts=parts))
    assert not in_generation_prompt(scene(ours, ours + "done", parts=parts)), "all of the prompt is common"
    assert not in_generation_prompt(scene(ours, "U: hello there\nA: done", parts=[]))
