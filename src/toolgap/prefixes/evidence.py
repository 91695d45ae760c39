"""What the two texts say of why they part, where the requests themselves do not differ."""

from collections.abc import Sequence
from typing import NamedTuple

from toolgap.prefixes.causes import Cause
from toolgap.prefixes.parts import Kind, Part


class Scene(NamedTuple):
    """Two renderings and where they part.

    Attributes:
        text: The earlier turn's, prompt and answer as far as known.
        next_text: The later turn's.
        offset: Of the first token that differs, in characters of ``text``.
        prompt_chars: Length of the prompt in ``text``.
        token: Text of the earlier turn's first token that differs; empty if it has no more.
        next_token: The later turn's.
        parts: Of the earlier request and its answer, in order.
        prompt_messages: Messages of the earlier request.
        roles: Of the later request's messages.
    """

    text: str
    next_text: str
    offset: int
    prompt_chars: int
    token: str
    next_token: str
    parts: Sequence[Part]
    prompt_messages: int
    roles: Sequence[str]


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the longest common first part."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


def contains(text: str, part: str) -> bool:
    """Whether a text has the part in it, blanks aside: templates trim, and tokenizers may join or split them."""
    return "".join(part.split()) in "".join(text.split())


LOOK_AHEAD_CHARS = 24
"""Text that differs may change the tokens of what stands before it, but not from further away than a long word."""


def is_token_merge(scene: Scene) -> bool:
    """Whether both have the same text there, in other tokens: up to the end of one, or for longer than a word."""
    if not scene.token or not scene.next_token or scene.token == scene.next_token:
        return False
    ours, theirs = scene.text[scene.offset :], scene.next_text[scene.offset :]
    same = common_length(ours, theirs)
    if same == len(ours) or same == len(theirs):
        return same > 0
    return same >= max(len(scene.token), len(scene.next_token)) + LOOK_AHEAD_CHARS


CHANNEL = "<|channel|>"
"""Of the Harmony format alone."""

ANALYSIS = f"{CHANNEL}analysis"


def is_harmony(scene: Scene) -> bool:
    """Whether the earlier text goes on with an analysis channel there, and the later one does not."""
    start = scene.text.find(ANALYSIS, max(scene.offset - len(ANALYSIS), 0))
    if not 0 <= start <= scene.offset:
        return False
    return not scene.next_text[start:].startswith(ANALYSIS)


MARKUP_CHARS = 48
"""How much a template may write between the place where two turns part and the reasoning that only one has."""


def dropped_reasoning(scene: Scene) -> Part | None:
    """The reasoning of the earlier turn that the later text lacks, if the texts part where it begins."""
    for part in scene.parts:
        reasoning = part.text.strip()
        if part.kind is not Kind.REASONING or not reasoning or contains(scene.next_text, reasoning):
            continue
        start = scene.text.find(reasoning)
        if start < 0 and part.message == scene.prompt_messages:
            start = scene.prompt_chars
        if start - MARKUP_CHARS <= scene.offset <= start + len(reasoning):
            return part
    return None


def user_arrived(scene: Scene) -> bool:
    """Whether the later request adds a user's message."""
    return "user" in scene.roles[scene.prompt_messages :]


def in_generation_prompt(scene: Scene) -> bool:
    """Whether the texts part in what the template wrote after the earlier request's last part."""
    if scene.offset >= scene.prompt_chars:
        return False
    prompt = scene.text[: scene.prompt_chars]
    asked = [part for part in scene.parts if part.message < scene.prompt_messages and part.text.strip()]
    if not asked:
        return False
    last = asked[-1].text.strip()
    start = prompt.rfind(last)
    return start >= 0 and scene.offset >= start + len(last)


def text_cause(scene: Scene) -> Cause | None:
    """The cause that the texts alone show, if they show one."""
    if is_token_merge(scene):
        return Cause.TOKEN_MERGE
    if is_harmony(scene):
        return Cause.HARMONY
    return None
