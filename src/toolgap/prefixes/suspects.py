"""What differs between two requests, each difference with the request that lacks it.

A difference is a suspect only: whether it is why the prompts part shows when the request is rendered without
it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolgap.prefixes.causes import Cause
from toolgap.prefixes.parts import (
    REASONING_FIELDS,
    Body,
    Kind,
    Part,
    canonical,
    first_difference,
    message_parts,
    tool_name,
    written_alike,
)
from toolgap.protocol import Api


class Suspect(NamedTuple):
    """One difference.

    Attributes:
        cause: What it would be called.
        place: Where it is, as a path in the later request's body.
        detail: What differs, in a sentence.
        undone: The later request without it.
    """

    cause: Cause
    place: str
    detail: str
    undone: Body


NAMESPACE_FIELDS = ("model", "lora_path", "cache_salt", "extra_key")

OPTION_FIELDS = (
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "output_config",
    "tool_choice",
    "response_format",
    "task",
    "continue_final_message",
)


def namespace_change(before: Body, after: Body) -> Suspect | None:
    """A model, adapter, salt or key that is not the same in both; a field that is left out is no change of model."""
    for field in NAMESPACE_FIELDS:
        one, other = before.get(field), after.get(field)
        if field == "model" and None in (one, other):
            continue
        if one != other:
            detail = f"{field} is {_shown(one)} in the earlier turn and {_shown(other)} in the later one."
            return Suspect(Cause.NAMESPACE, field, detail, {**after, field: one})
    return None


def suspects(before: Body, after: Body, api: Api | None, answer: Mapping[str, Any] | None) -> list[Suspect]:
    """All that differs in what both requests should share, roughly in the order of a prompt.

    Args:
        before: The earlier request.
        after: The later one.
        api: Whose form they have.
        answer: The message that answered the earlier one, if it is known.
    """
    found = [*_options(before, after), *_tools(before, after)]
    if api is Api.ANTHROPIC:
        found += _system(before, after)
    expected = list(before["messages"])
    if answer is not None:
        expected.append(answer)
    return [*found, *_messages(expected, after, len(before["messages"]))]


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _options(before: Body, after: Body) -> Iterator[Suspect]:
    for field in OPTION_FIELDS:
        one, other = before.get(field), after.get(field)
        if one != other:
            undone = {key: value for key, value in after.items() if key != field}
            if one is not None:
                undone[field] = one
            place = first_difference(one, other, field)
            detail = f"{field} is {_shown(one)} in the earlier turn and {_shown(other)} in the later one."
            yield Suspect(Cause.TEMPLATE_OPTIONS, place, detail, undone)


def _tools(before: Body, after: Body) -> Iterator[Suspect]:
    ones, others = before.get("tools") or [], after.get("tools") or []
    if written_alike(ones, others):
        return
    undone = {**after, "tools": list(ones)} if ones else {k: v for k, v in after.items() if k != "tools"}
    names, other_names = [tool_name(tool) for tool in ones], [tool_name(tool) for tool in others]
    if names == other_names:
        number = next(i for i, one in enumerate(ones) if not written_alike(one, others[i]))
        place = first_difference(ones[number], others[number], f"tools[{number}]")
        if canonical(ones) == canonical(others):
            detail = f"The keys of {names[number]!r} stand in another order."
            yield Suspect(Cause.SCHEMA_ORDER, place, detail, undone)
        else:
            detail = f"The definition of {names[number]!r} was changed."
            yield Suspect(Cause.TOOLS, place, detail, undone)
        return
    added, removed = Counter(other_names) - Counter(names), Counter(names) - Counter(other_names)
    number = next(
        (i for i, (one, other) in enumerate(zip(names, other_names, strict=False)) if one != other),
        min(len(names), len(other_names)),
    )
    changes = [
        f"{word}: {', '.join(map(repr, counted.elements()))}"
        for word, counted in (("added", added), ("removed", removed))
        if counted
    ]
    detail = f"Tools {'; '.join(changes)}." if changes else "The same tools stand in another order."
    yield Suspect(Cause.TOOLS, f"tools[{number}]", detail, undone)


def _system(before: Body, after: Body) -> Iterator[Suspect]:
    one, other = before.get("system"), after.get("system")
    if one == other:
        return
    place = first_difference(one, other, "system")
    undone = {key: value for key, value in after.items() if key != "system"}
    if one is not None:
        undone["system"] = one
    cause, detail = _changed_text(_joined(one), _joined(other), Cause.SYSTEM_PROMPT)
    yield Suspect(cause, place, detail, undone)


def _joined(system: Any) -> str:
    if isinstance(system, list):
        return "\n".join(str(block.get("text", "")) for block in system if isinstance(block, dict))
    return str(system or "")


def _messages(expected: Sequence[Any], after: Body, prompt_messages: int) -> Iterator[Suspect]:
    messages = list(after["messages"])
    compacted = _compacted(expected[:prompt_messages], messages)
    if compacted is not None:
        yield Suspect(
            Cause.COMPACTED, *compacted, {**after, "messages": [*expected[:prompt_messages], messages[-1]]}
        )
        return
    reordered = _results_reordered(expected, messages)
    if reordered is not None:
        number, undone = reordered
        yield Suspect(
            Cause.RESULTS,
            f"messages[{number}]",
            "The same tool results stand in another order.",
            {**after, "messages": undone},
        )
        return
    for number, (one, other) in enumerate(zip(expected, messages, strict=False)):
        difference = _message(one, other, number)
        if difference is not None:
            undone = [*messages[:number], one, *messages[number + 1 :]]
            yield Suspect(*difference, {**after, "messages": undone})


def _role(message: Any) -> str:
    return str(message.get("role"))


def _compacted(expected: Sequence[Any], messages: Sequence[Any]) -> tuple[str, str] | None:
    """Place and words if messages are missing: the later history is shorter, or its roles no longer fit."""
    for number, one in enumerate(expected):
        if number >= len(messages):
            return f"messages[{number}]", f"{len(expected) - number} messages of the earlier turn are gone."
        if _role(messages[number]) != _role(one):
            return (
                f"messages[{number}]",
                f"A message of the {_role(one)!r} stood here, and one of the {_role(messages[number])!r} does now.",
            )
    if len(messages) < len(expected) + 1:
        return f"messages[{len(messages) - 1}]", "The later turn adds no message."
    return None


def _results_reordered(expected: Sequence[Any], messages: Sequence[Any]) -> tuple[int, list[Any]] | None:
    """The first of a run of tool messages that stand in another order, and all messages in the old one."""
    ones, others = list(expected), list(messages[: len(expected)])
    wrong = [number for number, (a, b) in enumerate(zip(ones, others, strict=False)) if a != b]
    if len(wrong) < 2 or any(_role(ones[number]) != "tool" for number in wrong):
        return None
    if Counter(_identity(ones[n]) for n in wrong) != Counter(_identity(others[n]) for n in wrong):
        return None
    return wrong[0], [*ones, *messages[len(ones) :]]


def _identity(message: Mapping[str, Any]) -> str:
    return str(canonical(dict(message)))


Difference = tuple[Cause, str, str]


def _message(one: Mapping[str, Any], other: Mapping[str, Any], number: int) -> Difference | None:
    befores, afters = message_parts(one, number), message_parts(other, number)
    had, has = _reasoning(befores), _reasoning(afters)
    if had is not None and has is None:
        return (
            Cause.REASONING_NOT_SENT,
            had.path,
            "The answer had reasoning, and the later request's message has none.",
        )
    if had is not None and has is not None and _field(had) != _field(has):
        return (
            Cause.REASONING_NOT_SENT,
            has.path,
            f"The answer's reasoning came as {_field(had)!r} and went back as {_field(has)!r}.",
        )
    for before, after in zip(befores, afters, strict=False):
        if (before.kind, before.name) != (after.kind, after.name):
            return Cause.EDITED, after.path, f"A part of the kind {before.kind.value!r} was replaced."
        if not written_alike(before.value, after.value):
            return _part(before, after)
    if len(befores) != len(afters):
        path = max(befores, afters, key=len)[min(len(befores), len(afters))].path
        return Cause.EDITED, path, "A part of the message was added or is gone."
    return None


def _reasoning(parts: Sequence[Part]) -> Part | None:
    return next((part for part in parts if part.kind is Kind.REASONING), None)


def _field(part: Part) -> str:
    return part.path.rpartition(".")[2]


def _part(before: Part, after: Part) -> Difference:
    same_json = canonical(before.value) is not None and canonical(before.value) == canonical(after.value)
    match before.kind:
        case Kind.SYSTEM:
            cause, detail = _changed_text(before.text, after.text, Cause.SYSTEM_PROMPT)
            return cause, after.path, detail
        case Kind.CALL if same_json:
            detail = f"The arguments of {before.name!r} are the same JSON, written differently."
            return Cause.ARGUMENTS, after.path, detail
        case Kind.RESULT if same_json:
            return Cause.RESULTS, after.path, "The result is the same JSON, written differently."
        case _:
            cause, detail = _changed_text(before.text, after.text, Cause.EDITED)
            return cause, after.path, detail


_BILLING = re.compile(r"x-anthropic-billing-header|\bcch=", re.IGNORECASE)

_NONCES = (
    (
        "a random id",
        r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?=[a-z]*\d)(?=\d*[a-z])[0-9a-f]{8,}",
    ),
    (
        "a time",
        r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?|\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?Z?|\d{9,}(?:\.\d+)?",
    ),
)
_WORD = re.compile(r"[^\s\"'<>()\[\]{}=,;]+")


def _changed_text(before: str, after: str, otherwise: Cause) -> tuple[Cause, str]:
    """Cause and words for two texts that differ: a nonce only if all that differs looks like one."""
    words, other_words = _WORD.findall(before), _WORD.findall(after)
    start = next(
        (i for i, (a, b) in enumerate(zip(words, other_words, strict=False)) if a != b),
        min(len(words), len(other_words)),
    )
    shown = f"{_shown(' '.join(words[start : start + 6]))} became {_shown(' '.join(other_words[start : start + 6]))}."
    shown = shown[0].upper() + shown[1:]
    changed = [(a, b) for a, b in zip(words, other_words, strict=False) if a != b]
    if len(words) != len(other_words) or not changed:
        return otherwise, shown
    if _BILLING.search(before) and _BILLING.search(after) and _only_billing(before, after):
        return Cause.BILLING_HEADER, shown
    for what, pattern in _NONCES:
        if all(re.fullmatch(pattern, word, re.IGNORECASE) for pair in changed for word in _trimmed(pair)):
            return Cause.NONCE, f"What differs looks like {what}: {shown}"
    return otherwise, shown


def _trimmed(pair: tuple[str, str]) -> tuple[str, str]:
    return pair[0].strip(".:!?"), pair[1].strip(".:!?")


def _only_billing(before: str, after: str) -> bool:
    lines, other_lines = before.splitlines(), after.splitlines()
    return len(lines) == len(other_lines) and all(
        a == b or (_BILLING.search(a) and _BILLING.search(b)) for a, b in zip(lines, other_lines, strict=True)
    )


def with_reasoning(after: Body, number: int, api: Api | None, reasoning: str) -> Body | None:
    """The request with reasoning in the answer at that position; None if there is no answer, or it has some."""
    messages = list(after["messages"])
    if number >= len(messages) or _role(messages[number]) != "assistant":
        return None
    message = dict(messages[number])
    if any(part.kind is Kind.REASONING for part in message_parts(message, number)):
        return None
    if api is Api.ANTHROPIC:
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
        message["content"] = [{"type": "thinking", "thinking": reasoning, "signature": ""}, *blocks]
    else:
        message[REASONING_FIELDS[0]] = reasoning
    messages[number] = message
    return {**after, "messages": messages}


RETENTION_FLAGS: tuple[tuple[str, bool], ...] = (
    ("preserve_thinking", True),
    ("clear_thinking", False),
    ("drop_thinking", False),
    ("keep_past_thinking", True),
)
"""Flags of published templates, and the value that keeps reasoning."""


def with_flag(body: Body, flag: str, value: bool) -> Body:  # noqa: FBT001 - the flag's value
    """The request with a flag for its template."""
    return {**body, "chat_template_kwargs": {**(body.get("chat_template_kwargs") or {}), flag: value}}
