"""The agent's conversation: what it says, and how much of the repository it reads. No I/O.

The calls of the tools are scripted, because a model small enough for a laptop does not make them reliably.
Everything else is real: the definitions and the results of the tools, the chat template, the tokens, and
the answer.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolgap.demo.errors import DemoError
from toolgap.demo.tool import TEST_MODULE, TOOLS

Message = dict[str, Any]

SYSTEM = (
    "You are a careful coding agent. You work on a small Python repository and use tools to look into it. "
    "Call one tool at a time. When you know enough, answer in one short sentence."
)
TASK = "Read the vendored sources of this repository, run its tests, and tell me whether they pass."
REMINDER = "Do the tests pass? Answer in one sentence."
"""Follows the tool's result, as agent frameworks like to do; without it a small model calls the tool again."""

_TOOLS_IN_WORDS = (
    "You can call these tools:\n<tools>\n{tools}\n</tools>\nTo call one, answer with its name and arguments:\n"
    '<tool_call>\n{{"name": ..., "arguments": {{...}}}}\n</tool_call>'
)


class Read(NamedTuple):
    """One call of the tool ``read_file`` and what it returned."""

    path: str
    lines: int
    text: str


@dataclass(frozen=True)
class Conversation:
    """An agent's conversation up to and including its call of ``run_tests``."""

    reads: Sequence[Read]
    native_tools: bool
    """Whether the model's chat template knows tools; otherwise the system message describes them."""

    @property
    def messages(self) -> list[Message]:
        """All messages, the last of them the call of ``run_tests``."""
        system = SYSTEM
        if not self.native_tools:
            listed = "\n".join(json.dumps(tool) for tool in TOOLS)
            system += "\n\n" + _TOOLS_IN_WORDS.format(tools=listed)
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": TASK},
        ]
        for number, read in enumerate(self.reads):
            messages.append(self._call(number, "read_file", {"path": read.path, "lines": read.lines}))
            messages.append(_result(number, read.text))
        messages.append(self._call(len(self.reads), "run_tests", {"module": TEST_MODULE}))
        return messages

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """What goes with the messages to the chat template."""
        return TOOLS if self.native_tools else None

    def continued(self, tool_output: str) -> list[Message]:
        """The messages of the continuation: these, the result of ``run_tests`` and a reminder to answer."""
        result = _result(len(self.reads), tool_output)
        return [*self.messages, result, {"role": "user", "content": REMINDER}]

    def _call(self, number: int, name: str, arguments: dict[str, Any]) -> Message:
        if self.native_tools:
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": _call_id(number), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        call_text = json.dumps({"name": name, "arguments": arguments})
        return {"role": "assistant", "content": f"<tool_call>\n{call_text}\n</tool_call>"}


def _call_id(number: int) -> str:
    return f"call_{number + 1}"


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": _call_id(number), "content": text}


def share_lines(total_lines: int, files: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Which files to read, and how many lines of each, to read that many lines in all."""
    shares = []
    for path, lines in files:
        if total_lines <= 0:
            break
        shares.append((path, min(lines, total_lines)))
        total_lines -= lines
    return shares


def fit(
    prompt_tokens: int,
    files: Sequence[tuple[str, int]],
    read: Callable[[str, int], str],
    count: Callable[[Conversation], int],
    *,
    native_tools: bool,
) -> Conversation:
    """The shortest conversation of at least `prompt_tokens` tokens, to the line.

    Args:
        prompt_tokens: What its tokens must come to.
        files: Path and lines of what there is to read, in order.
        read: The tool ``read_file``.
        count: Tokens of a conversation, by the model's own template and tokenizer.
        native_tools: As in :class:`Conversation`.

    Raises:
        DemoError: all files together are too short.
    """

    def conversation(total_lines: int) -> Conversation:
        reads = [Read(path, lines, read(path, lines)) for path, lines in share_lines(total_lines, files)]
        return Conversation(reads, native_tools)

    # Upwards from a guess, because tokenizing every file for a short prompt would take longer than the rest.
    total_lines = sum(lines for _, lines in files)
    low, high = 1, min(total_lines, max(1, prompt_tokens // 16))
    while (longest := count(conversation(high))) < prompt_tokens:
        if high == total_lines:
            raise DemoError(
                f"the demo has text for a prompt of {longest:,} tokens at most, not {prompt_tokens:,}"
            )
        low, high = high + 1, min(total_lines, 2 * high)
    while low < high:
        middle = (low + high) // 2
        if count(conversation(middle)) >= prompt_tokens:
            high = middle
        else:
            low = middle + 1
    return conversation(low)


def common_prefix_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share from their start."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    return shared
