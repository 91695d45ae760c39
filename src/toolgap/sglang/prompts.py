"""In the HTTP process: which tokens a prefix is that was named by messages.

SGLang's own chat route makes the prompt, so that it is the continuation's, token for token. What the next
prompt certainly begins with is found by giving that route several ways in which the conversation may go on,
and taking what all of them begin with: no template has to be understood for that.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from toolgap.protocol import PROMPT_FIELDS, Api, Code, NamedPrefix, Refused
from toolgap.sglang.internals import ChatPrompt, ChatRoute, Prefix, PromptError

Messages = list[dict[str, Any]]

_CONTENTS = ("x", "\n\n", '{"x": 1}')
"""Ways in which unknown text may begin: with different tokens, and so that it may merge with what is before it."""


class Named(NamedTuple):
    """A prefix that messages name."""

    token_ids: "array[int]"
    stable_tokens: int
    """Its first part: the prompt of the answer that the messages end with; all of it if they end with none."""
    lora_path: str | None


class Turn(NamedTuple):
    """What messages end with."""

    asked: Messages
    """Those before the answer."""
    nexts: list[Messages]
    """Ways in which they may go on; empty if they are a whole prompt."""


def openai_turn(messages: Messages) -> Turn:
    """Where the answer begins in messages of ``/v1/chat/completions``, and how they may go on."""
    start = _answer_start(messages)
    if start is None:
        return Turn(messages, [])
    answer = [message for message in messages[start:] if message.get("role") == "assistant"]
    answered = {message.get("tool_call_id") for message in messages[start:] if message.get("role") == "tool"}
    calls = [
        call.get("id")
        for message in answer
        for call in _dicts(message.get("tool_calls"))
        if call.get("id") not in answered
    ]
    if calls:
        tails = [
            [{"role": "tool", "tool_call_id": call, "content": content} for call in calls]
            for content in _CONTENTS
        ]
    elif messages[-1].get("role") == "assistant":
        tails = [[{"role": "user", "content": content}] for content in _CONTENTS]
    else:
        return Turn(messages, [])
    return Turn(messages[:start], [[*messages, *tail] for tail in tails])


def anthropic_turn(messages: Messages) -> Turn:
    """Where the answer begins in messages of ``/v1/messages``, and how they may go on."""
    start = next(
        (i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), None
    )
    if start is None:
        return Turn(messages, [])
    uses = [block.get("id") for block in _blocks(messages[start], "tool_use")]
    results = [block for message in messages[start + 1 :] for block in _blocks(message, "tool_result")]
    answered = {block.get("tool_use_id") for block in results}
    missing = [use for use in uses if use not in answered]
    while start and messages[start - 1].get("role") == "assistant":
        start -= 1
    if missing:
        last = messages[-1] if messages[-1].get("role") == "user" else None
        before = messages[:-1] if last else messages
        blocks = _dicts(last.get("content")) if last else []
        return Turn(
            messages[:start],
            [
                [*before, {"role": "user", "content": [*blocks, *_results(missing, content)]}]
                for content in _CONTENTS
            ],
        )
    if messages[-1].get("role") == "assistant":
        return Turn(
            messages[:start], [[*messages, {"role": "user", "content": content}] for content in _CONTENTS]
        )
    return Turn(messages, [])


def _results(uses: Sequence[Any], content: str) -> Messages:
    return [{"type": "tool_result", "tool_use_id": use, "content": content} for use in uses]


def _answer_start(messages: Messages) -> int | None:
    """Index of the first message of the answer that messages end with, results of its tool calls included."""
    start = len(messages)
    while start and messages[start - 1].get("role") == "tool":
        start -= 1
    if not start or messages[start - 1].get("role") != "assistant":
        return None
    while start and messages[start - 1].get("role") == "assistant":
        start -= 1
    return start


def _dicts(value: Any) -> Messages:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _blocks(message: dict[str, Any], kind: str) -> Messages:
    return [block for block in _dicts(message.get("content")) if block.get("type") == kind]


async def name_by_messages(route: ChatRoute, prefix: NamedPrefix) -> Named:
    """The tokens that the next prompt certainly begins with.

    Raises:
        Refused: 400 if SGLang's route would refuse these messages, 501 for what cannot be restored.
    """
    api = prefix.api or Api.OPENAI
    body = {field: value for field in PROMPT_FIELDS if (value := getattr(prefix, field)) is not None}
    messages: Messages = body.pop("messages")
    if prefix.lora_path is not None:
        body["lora_path"] = prefix.lora_path
    if prefix.continue_final_message:
        turn = Turn(messages, [])
    else:
        turn = anthropic_turn(messages) if api is Api.ANTHROPIC else openai_turn(messages)
    prompts = [await _render(route, api, body, messages) for messages in turn.nexts or [turn.asked]]
    token_ids = _common([prompt.token_ids for prompt in prompts])
    stable_tokens = len(token_ids)
    if turn.nexts:
        asked = await _render(route, api, body, turn.asked) if turn.asked else None
        stable_tokens = 0 if asked is None else len(_common([token_ids, asked.token_ids]))
    if not token_ids:
        raise Refused(
            Code.INVALID_FIELD,
            "messages: nothing of the next prompt is certain, so there is nothing to restore",
            field="messages",
        )
    return Named(token_ids, stable_tokens, prompts[0].lora_path)


async def _render(route: ChatRoute, api: Api, body: dict[str, Any], messages: Messages) -> ChatPrompt:
    try:
        prompt = await route.render(api, {**body, "messages": messages})
    except PromptError as error:
        field = error.field or "messages"
        raise Refused(Code.INVALID_FIELD, f"{field}: {error}", field=field) from None
    if prompt.has_media:
        raise Refused(
            Code.NOT_SUPPORTED, "messages: this release does not support multimodal input", field="messages"
        )
    return prompt


def _common(prompts: Sequence["array[int]"]) -> "array[int]":
    """What all prompts begin with."""
    first = Prefix(prompts[0], None, None)
    return prompts[0][: min(first.shared_tokens(Prefix(prompt, None, None)) for prompt in prompts)]
