"""Transcripts of Claude Code: a JSON object a line, one content block each, of which a line may be half written."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolgap.hooks.tool_calls import Message

TAIL_BYTES = 4 << 20
"""An answer with its tool calls stands at the end."""


def read_tail(path: Path) -> list[str]:
    """The last lines of a transcript; none if there is no such file yet."""
    if path.suffix != ".jsonl":
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # Not splitlines(): JSON may hold what Unicode calls a line's end.
    lines = text.split("\n")
    return [line for line in (lines[1:] if size > TAIL_BYTES else lines) if line]


def answer_that_calls(lines: Iterable[str], tool_use_id: str) -> Message | None:
    """The answer that has this tool call, in the API's form; None if it is not written yet.

    Its blocks stand in lines of their own, which share the message's id.
    """
    blocks_of: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        message_id, blocks = _answer_blocks(line)
        if message_id is not None:
            # A block that is written again, as streams do, counts once.
            own = blocks_of.setdefault(message_id, [])
            own += [block for block in blocks if block not in own]
    for blocks in reversed(blocks_of.values()):
        if tool_use_id in tool_uses(blocks):
            return {"role": "assistant", "content": blocks}
    return None


def tool_uses(blocks: Any) -> list[str]:
    """Ids of the tool calls among a message's blocks, in order."""
    uses = [block for block in blocks if block.get("type") == "tool_use"] if isinstance(blocks, list) else []
    return [str(block.get("id")) for block in uses]


def _answer_blocks(line: str) -> tuple[str | None, list[dict[str, Any]]]:
    try:
        entry = json.loads(line)
    except ValueError:
        return None, []
    message = entry.get("message") if isinstance(entry, dict) else None
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return None, []
    content, message_id = message.get("content"), message.get("id")
    if not isinstance(content, list) or not isinstance(message_id, str):
        return None, []
    return message_id, [block for block in content if isinstance(block, dict)]
