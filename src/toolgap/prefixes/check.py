"""Checking pairs of turns: renders them, finds where they part, and tries what each suspect would mend."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from toolgap.client import ToolgapError
from toolgap.prefixes.causes import Cause
from toolgap.prefixes.evidence import (
    CHANNEL,
    Scene,
    common_length,
    contains,
    dropped_reasoning,
    in_generation_prompt,
    text_cause,
    user_arrived,
)
from toolgap.prefixes.parts import Body, Kind, Part, locate, message_parts, parts_of, place_of
from toolgap.prefixes.report import Divergence, KnownBy, Pair, Portion, Report, divergence
from toolgap.prefixes.server import Renderer
from toolgap.prefixes.suspects import (
    RETENTION_FLAGS,
    Suspect,
    namespace_change,
    suspects,
    with_flag,
    with_reasoning,
)
from toolgap.prefixes.turns import Turn, TurnsError, sessions
from toolgap.protocol import Api

BEFORE_TOKENS = 8
"""Decoded context before the place where two turns part."""

AFTER_TOKENS = 16
"""Decoded context after it, on both sides."""

SHOWN_CHARS = 64
"""The same of a text whose tokens are not known."""

MOST_TRIALS = 16
"""Suspects that are tried, each by a rendering: the first that helps is the cause, and the first come first."""

STAND_IN = "Let me see."
"""Stands for reasoning that is not known."""


class TurnRefused(Exception):  # noqa: N818 - a refusal is an answer, not a fault
    """The server refuses one of the turns; ``turn`` says which, ``error`` why."""

    def __init__(self, turn: str, error: ToolgapError) -> None:
        super().__init__(f"{turn}: {error}")
        self.turn = turn
        self.error = error


class Measure(NamedTuple):
    """Two renderings held against each other.

    Attributes:
        ids: What the earlier turn left: its prompt and, as far as known, its answer.
        prompt_tokens: Length of the prompt.
        next_ids: The later turn's prompt.
        common: Where they part.
        lacks_reasoning: The later text lacks the answer's reasoning, whose tokens are not known.
    """

    ids: list[int]
    prompt_tokens: int
    next_ids: list[int]
    common: int
    lacks_reasoning: bool

    @property
    def lost(self) -> int:
        """What is lost, in tokens; reasoning of unknown length counts as one."""
        return len(self.ids) - self.common + self.lacks_reasoning


def check(turns: Sequence[Turn], renderer: Renderer, min_share: float = 1.0) -> Report:
    """Check every pair of consecutive turns of every session.

    Args:
        turns: Of one or more sessions, in order.
        renderer: The server.
        min_share: What share of the earlier turn's tokens a pair must have in common to pass; at 1 the later
            turn must extend the earlier one.

    Raises:
        TurnsError: no session has two turns.
        TurnRefused: the server refuses a turn's request.
        ToolgapUnreachable: the server does not answer.
    """
    grouped = sessions(turns)
    if all(len(members) < 2 for members in grouped.values()):
        raise TurnsError("there are no two turns of one session to compare")
    page_tokens = renderer.page_tokens()
    pairs = [
        _check(session, number, before, after, renderer, page_tokens)
        for session, members in grouped.items()
        for number, (before, after) in enumerate(pairwise(members), 1)
    ]
    return Report(ok=all(pair.is_enough(min_share) for pair in pairs), min_share=min_share, pairs=pairs)


def _check(
    session: str | None, number: int, before: Turn, after: Turn, renderer: Renderer, page_tokens: int
) -> Pair:
    name = "" if session is None else f"session {session}, "
    for turn, where in ((before, number), (after, number + 1)):
        try:
            renderer.ids(turn.request, turn.api)
        except ToolgapError as error:
            raise TurnRefused(f"{name}turn {where}", error) from None
    comparison = _Comparison(before, after, renderer)
    measure = comparison.measured
    changed = namespace_change(before.request, after.request)
    common = 0 if changed else measure.common
    extends = not changed and not measure.lost
    answer_tokens = len(measure.ids) - measure.prompt_tokens
    return Pair(
        session=session,
        turn=number,
        tokens=len(measure.ids),
        next_tokens=len(measure.next_ids),
        common_tokens=common,
        common_page_tokens=common // page_tokens * page_tokens,
        page_tokens=page_tokens,
        share=common / len(measure.ids),
        prompt=Portion(tokens=measure.prompt_tokens, common_tokens=min(common, measure.prompt_tokens)),
        answer=Portion(tokens=answer_tokens, common_tokens=max(common - measure.prompt_tokens, 0))
        if answer_tokens
        else None,
        answer_known_by=comparison.answer_known_by,
        extends=extends,
        divergence=None if extends else comparison.divergence(changed),
    )


class Finding(NamedTuple):
    """Why two turns part."""

    cause: Cause
    detail: str
    place: str | None = None
    """Better than what the text says."""


class _Comparison:
    """Two turns, their renderings, and what is tried on them."""

    def __init__(self, before: Turn, after: Turn, renderer: Renderer) -> None:
        self._before, self._after = before.request, after.request
        # Both bodies are of one session; its turns have one form.
        self._api: Api | None = before.api
        self._renderer = renderer
        self._prompt_messages = len(before.request["messages"])
        self._responded = before.answer() is not None
        self._answer = before.answer() if self._responded else self._added_answer()
        self._answer_ids = before.answer_ids()
        self.known_by: KnownBy | None = KnownBy.TOKENS if self._answer_ids else None
        answer = [] if self._answer is None else message_parts(self._answer, self._prompt_messages)
        self._answer_parts = answer
        self.measured = self._measure(self._before, self._after, first=True)

    def _added_answer(self) -> dict[str, Any] | None:
        """The answer as the later request shows it; None if that does not go on with one."""
        added = self._after["messages"][self._prompt_messages :]
        return dict(added[0]) if added and added[0].get("role") == "assistant" else None

    # ---- measuring ----

    def _measure(self, before: Body, after: Body, *, first: bool = False) -> Measure:
        prompt = self._renderer.ids(before, self._api)
        next_ids = self._renderer.ids(after, self._api)
        lacks = self.known_by is not KnownBy.TOKENS and self._lacks_reasoning(next_ids)
        # What follows the place where the reasoning should stand is as lost as the reasoning.
        ids = prompt if lacks else self._left(before, prompt, first=first)
        return Measure(ids, len(prompt), next_ids, common_length(ids, next_ids), lacks)

    def _left(self, before: Body, prompt: list[int], *, first: bool) -> list[int]:
        if self._answer_ids is not None:
            # The last token of an answer was never an input, so that it has no KV.
            return [*prompt, *self._answer_ids[:-1]]
        if self._answer is None:
            return prompt
        expected = self._renderer.ids_if_valid(
            {**before, "messages": [*before["messages"], self._answer]}, self._api
        )
        if expected is None or common_length(expected, prompt) < len(prompt):
            return prompt
        if first:
            self.known_by = self._known_by_message
        return expected

    @property
    def _known_by_message(self) -> KnownBy:
        return KnownBy.MESSAGE if self._responded else KnownBy.NEXT_TURN

    def _lacks_reasoning(self, next_ids: list[int]) -> bool:
        reasoning = self._reasoning()
        if not reasoning:
            return False
        [text] = self._renderer.texts([next_ids])
        return any(not contains(text, part) for part in reasoning)

    def _reasoning(self) -> list[str]:
        """The answer's, as far as it is known."""
        texts = [part.text.strip() for part in self._answer_parts if part.kind is Kind.REASONING]
        return [text for text in texts if text]

    def _try(self, before: Body, after: Body) -> Measure | None:
        """A measure of other requests; None if the server refuses one of them."""
        try:
            return self._measure(before, after)
        except ToolgapError:
            return None

    def _helps(self, before: Body, after: Body) -> bool:
        tried = self._try(before, after)
        return tried is not None and tried.lost < self.measured.lost

    @property
    def answer_known_by(self) -> KnownBy | None:
        """How what was measured of the answer is known."""
        if self.measured.lacks_reasoning:
            return self._known_by_message
        return self.known_by if len(self.measured.ids) > self.measured.prompt_tokens else None

    # ---- the cause ----

    def divergence(self, changed: Suspect | None) -> Divergence:
        """Where and why the turns part."""
        ids, prompt_tokens, next_ids, common, lacks_reasoning = self.measured
        at = 0 if changed else common
        text, next_text, start, prompt, before, ours, theirs, token, next_token = self._renderer.texts(
            [
                ids,
                next_ids,
                ids[:at],
                ids[:prompt_tokens],
                ids[max(at - BEFORE_TOKENS, 0) : at],
                ids[at : at + AFTER_TOKENS],
                next_ids[at : at + AFTER_TOKENS],
                ids[at : at + 1],
                next_ids[at : at + 1],
            ]
        )
        if lacks_reasoning and at == len(ids):
            # Its tokens are not known, but this is how it begins.
            ours = self._reasoning()[0][:SHOWN_CHARS]
        scene = Scene(
            text=text,
            next_text=next_text,
            offset=len(start),
            prompt_chars=len(prompt),
            token=token,
            next_token=next_token,
            parts=[*parts_of(self._before, self._api), *self._answer_parts],
            prompt_messages=self._prompt_messages,
            roles=[str(message.get("role")) for message in self._after["messages"]],
        )
        finding = Finding(changed.cause, changed.detail, changed.place) if changed else self._finding(scene)
        return divergence(
            finding.cause,
            token=at,
            place=finding.place or self._place(scene),
            before_text=before,
            text=ours,
            next_text=theirs,
            detail=finding.detail,
        )

    def _place(self, scene: Scene) -> str:
        if in_generation_prompt(scene):
            return "the generation prompt"
        tools: list[Any] = self._before.get("tools") or []
        spans = locate(scene.text, scene.parts, tools)
        if scene.offset >= scene.prompt_chars:
            answer = [span for span in spans if span.start >= scene.prompt_chars]
            inside = place_of(scene.offset, answer) if answer else ""
            return (
                inside if inside.startswith("messages") else f"the answer (messages[{self._prompt_messages}])"
            )
        return place_of(scene.offset, spans)

    def _finding(self, scene: Scene) -> Finding:
        found = suspects(self._before, self._after, self._api, self._answer)
        for suspect in found[:MOST_TRIALS]:
            if self._helps(self._before, suspect.undone):
                return Finding(suspect.cause, suspect.detail, suspect.place)
        if in_generation_prompt(scene) and self._needs_reasoning():
            return Finding(
                Cause.REASONING_NOT_SENT,
                "The generation prompt opens reasoning, which the later request's message does not have; with some "
                "in it, the later turn extends this prompt.",
                f"messages[{self._prompt_messages}]",
            )
        match text_cause(scene):
            case Cause.TOKEN_MERGE:
                detail = f"The earlier turn has the token {scene.token!r} here, the later one {scene.next_token!r}."
                return Finding(Cause.TOKEN_MERGE, detail)
            case Cause.HARMONY:
                detail = "The analysis channel of the earlier turn is not in the later one."
                return Finding(Cause.HARMONY, detail)
            case _:
                return self._template_finding(scene, found)

    def _template_finding(self, scene: Scene, found: Sequence[Suspect]) -> Finding:
        """The requests do not differ in a way that matters: the template makes them part."""
        dropped = dropped_reasoning(scene)
        if dropped is not None:
            finding = self._dropped(dropped, scene, found)
            if finding is not None:
                return finding
        if in_generation_prompt(scene):
            return Finding(
                Cause.GENERATION_PROMPT, "The messages that both turns have are rendered alike up to there."
            )
        answer_changed = any(
            suspect.place.startswith(f"messages[{self._prompt_messages}]") for suspect in found
        )
        if scene.offset >= scene.prompt_chars and self.known_by is KnownBy.TOKENS and not answer_changed:
            return Finding(
                Cause.TEMPLATE_TEXT,
                f"The model wrote {scene.token!r} here, and the template writes {scene.next_token!r}.",
            )
        return Finding(Cause.UNKNOWN, _undecided(found))

    def _dropped(self, part: Part, scene: Scene, found: Sequence[Suspect]) -> Finding | None:
        after = next(
            (suspect.undone for suspect in found if suspect.cause is Cause.REASONING_NOT_SENT), self._after
        )
        for flag, value in RETENTION_FLAGS:
            if self._helps(with_flag(self._before, flag, value), with_flag(after, flag, value)):
                shown = f'"{flag}": {"true" if value else "false"}'
                return Finding(
                    Cause.RETENTION, f"With {shown} in chat_template_kwargs the reasoning stays.", part.path
                )
        if user_arrived(scene):
            detail = f"A user's message arrived, and the reasoning of {part.path} is not in the later prompt."
            return Finding(Cause.THINKING_DROPPED, detail, part.path)
        if part.message < self._prompt_messages:
            return None
        cause = Cause.HARMONY if CHANNEL in scene.next_text else Cause.THINKING_DROPPED
        return Finding(cause, "The template writes no reasoning here, even if it is sent back.", part.path)

    def _needs_reasoning(self) -> bool:
        """Whether the later request would extend the prompt if its answer had reasoning."""
        if self._responded and not self._reasoning():
            return False
        restored = with_reasoning(self._after, self._prompt_messages, self._api, STAND_IN)
        tried = None if restored is None else self._try(self._before, restored)
        return tried is not None and tried.common >= tried.prompt_tokens


def _undecided(found: Sequence[Suspect]) -> str:
    if not found:
        return (
            "The requests do not differ in what both have: the template writes the same messages differently, "
            "depending on what follows them."
        )
    return f"The requests differ in {', '.join(_places(found))}, but undoing any one of these does not help."


def _places(found: Sequence[Suspect]) -> Iterator[str]:
    yield from dict.fromkeys(suspect.place for suspect in found)
