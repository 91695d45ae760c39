# ruff: noqa: RUF001 - the marks are as models write them
"""Tool calls that a model writes into its text, where nobody has taken them out: those of text completions. Pure.

A format is known by its marks, which are those that SGLang's parsers of tool calls look for. What a text ends with
decides: a call that more text follows is one that is quoted.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

UNNAMED = "tool"
"""Stands for the name of a tool that is called in a way that cannot be read."""

MAX_CALLS = 128
"""In one text; more are no more told."""


class Format(NamedTuple):
    """What calls are written between."""

    begin: str
    end: str | None
    """None if they go on to the text's end, and are JSON."""


FORMATS = (
    Format("<tool_call>", "</tool_call>"),  # Hermes, Qwen, GLM, MiMo
    Format("[TOOL_CALLS]", None),  # Mistral
    Format("<|python_tag|>", None),  # Llama
    Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # DeepSeek
    Format("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),  # Step
    Format("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # Kimi
    Format("<minimax:tool_call>", "</minimax:tool_call>"),
    Format("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM
    Format("<|START_ACTION|>", "<|END_ACTION|>"),  # Command
)
LONGEST_MARK = max(len(mark) for form in FORMATS for mark in form if mark is not None)

_NAMED = re.compile(
    r"<function=([^<>\s]+)>"
    r"|<(?:steptml:)?invoke name=\"([^\"<>]+)\""
    r"|<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\s]+)"
    r"|<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<|:]+)"
)
"""Names as formats write them that are no JSON."""

_BARE = re.compile(r"\s*\[?([\w.-]+)\s*(?:[\n<(]|$)")
"""A name that begins a call: GLM's, and a call as in Python."""

_COMPACT = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]")


def begins(text: str) -> bool:
    """Whether a call begins in it."""
    return any(form.begin in text for form in FORMATS)


def written_calls(text: str) -> tuple[str, ...]:
    """Names of the tools that are called at a text's end, in order; empty if it ends with no call that is known."""
    for form in FORMATS:
        if form.begin in text:
            names = _open_calls(text, form) if form.end is None else _closed_calls(text, form)
            if names:
                return tuple(names[:MAX_CALLS])
    return ()


def _closed_calls(text: str, form: Format) -> list[str]:
    assert form.end is not None
    rest = text.rstrip()
    blocks: list[str] = []
    while rest.endswith(form.end) and len(blocks) < MAX_CALLS:
        end = len(rest) - len(form.end)
        start = rest.rfind(form.begin, 0, end)
        if start < 0:
            break
        block = rest[start + len(form.begin) : end]
        if form.end in block:
            break
        blocks.append(block)
        rest = rest[:start].rstrip()
    return [name for block in reversed(blocks) for name in _names(block)]


def _open_calls(text: str, form: Format) -> list[str]:
    names: list[str] = []
    for part in text.split(form.begin, MAX_CALLS)[1:]:
        compact = _COMPACT.match(part)
        values = _json_values(part[compact.end() :] if compact else part)
        if values is None:
            return []
        names += [compact[1]] if compact else [_name(value) for value in values]
    return names


def _names(block: str) -> list[str]:
    if values := _json_values(block):
        return [_name(value) for value in values]
    named = [next(filter(None, match.groups())) for match in _NAMED.finditer(block)]
    if named:
        return named
    bare = _BARE.match(block)
    return [bare[1] if bare else UNNAMED]


def _name(value: Any) -> str:
    for key in ("name", "tool_name"):
        name = value.get(key) if isinstance(value, dict) else None
        if isinstance(name, str) and name:
            return name
    return UNNAMED


def _json_values(text: str) -> list[Any] | None:
    """Objects that a text consists of, alone, in a list or one after the other; None if it is anything else."""
    try:
        values = list(_decoded(text))
    except (ValueError, RecursionError):
        return None
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return flat if flat and all(isinstance(item, dict) for item in flat) else None


def _decoded(text: str) -> Iterator[Any]:
    decoder, place = json.JSONDecoder(), 0
    while True:
        while place < len(text) and (text[place].isspace() or text[place] in ";,"):
            place += 1
        if place == len(text):
            return
        value, place = decoder.raw_decode(text, place)
        yield value
