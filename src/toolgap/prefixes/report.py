"""What the check found: as records for machines, and printed for people."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from rich.console import Console
from rich.markup import escape

from toolgap.prefixes.causes import CAUSES, Cause


class KnownBy(StrEnum):
    """How an answer is known."""

    TOKENS = "tokens"
    MESSAGE = "message"
    NEXT_TURN = "next_turn"


class Portion(msgspec.Struct, kw_only=True, omit_defaults=False):
    """A part of what the earlier turn left in the cache, and how much of it the later turn begins with."""

    tokens: int
    common_tokens: int


class Divergence(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Where two turns part, and why.

    Attributes:
        token: Position of the first token that differs.
        place: The part of the earlier request, or of its answer, that it belongs to.
        before_text: The last tokens that both have, decoded.
        text: How the earlier turn goes on.
        next_text: How the later turn goes on.
        cause: See :data:`toolgap.prefixes.causes.CAUSES`.
        meaning: The cause in a sentence.
        detail: What it is in this case.
        mend: What to do.
    """

    token: int
    place: str
    before_text: str
    text: str
    next_text: str
    cause: Cause
    meaning: str
    detail: str
    mend: str


class Pair(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Two turns of a session, one after the other. Counts are of tokens.

    Attributes:
        session: The session's name, if it has one.
        turn: The earlier turn's number in the session, from 1.
        tokens: What the earlier turn left: its prompt and, as far as known, its answer.
        next_tokens: The later turn's prompt.
        common_tokens: What the later prompt begins with of the earlier turn's tokens.
        common_page_tokens: Its whole pages: what a cache can reuse.
        page_tokens: Tokens a page.
        share: ``common_tokens`` of ``tokens``, 0 to 1.
        prompt: The stable part: the earlier turn's prompt.
        answer: The expected part; null if its tokens are not known.
        answer_known_by: Its own tokens; or the message that it was parsed into, or that the later request has in its
            place, as the template writes it. With a message and no ``answer``, all of it is lost: the later turn
            lacks its reasoning.
        extends: Whether the later turn is an extension of the earlier one.
        divergence: Where and why it is not.
    """

    session: str | None
    turn: int
    tokens: int
    next_tokens: int
    common_tokens: int
    common_page_tokens: int
    page_tokens: int
    share: float
    prompt: Portion
    answer: Portion | None
    answer_known_by: KnownBy | None
    extends: bool
    divergence: Divergence | None = None

    def is_enough(self, min_share: float) -> bool:
        """Whether it passes: it extends, or a share that was asked for is common."""
        return self.extends or (min_share < 1.0 and self.share >= min_share)


class Report(msgspec.Struct, kw_only=True, omit_defaults=False):
    """All pairs; ``ok`` says whether each passes at ``min_share``."""

    ok: bool
    min_share: float
    pairs: list[Pair]


def divergence(
    cause: Cause,
    *,
    token: int,
    place: str,
    before_text: str,
    text: str,
    next_text: str,
    detail: str,
) -> Divergence:
    """A divergence with what is to be said of its cause."""
    meaning, mend = CAUSES[cause]
    return Divergence(
        token=token,
        place=place,
        before_text=before_text,
        text=text,
        next_text=next_text,
        cause=cause,
        meaning=meaning,
        detail=detail,
        mend=mend,
    )


def print_report(report: Report, console: Console) -> None:
    """Print for a person: one line a pair, and what is to be mended."""
    for pair in report.pairs:
        for line in _lines(pair, report.min_share):
            console.print(line, soft_wrap=True)
    failed = sum(not pair.is_enough(report.min_share) for pair in report.pairs)
    broken = sum(not pair.extends for pair in report.pairs)
    if broken == 0:
        console.print("Every turn extends the one before it.")
        return
    text = (
        f"{broken} of {len(report.pairs)} turns {'does' if broken == 1 else 'do'} not extend the one before"
    )
    if report.min_share < 1.0:
        text += f"; {failed} with less than {report.min_share:.0%} in common"
    console.print(f"{text}.")


def _lines(pair: Pair, min_share: float) -> Sequence[str]:
    session = "" if pair.session is None else f"session {escape(pair.session)}, "
    style = "green" if pair.extends else "yellow" if pair.is_enough(min_share) else "bold red"
    verdict = "extends" if pair.extends else "does not extend"
    lines = [
        f"{session}turn {pair.turn + 1} [{style}]{verdict}[/] turn {pair.turn}: {pair.common_tokens} of "
        f"{pair.tokens} tokens in common ({pair.share:.1%}; {pair.common_page_tokens} in whole pages of "
        f"{pair.page_tokens}), turn {pair.turn + 1} has {pair.next_tokens}",
        f"  prompt  {pair.prompt.common_tokens} of {pair.prompt.tokens} tokens (stable)",
        f"  answer  {_answer(pair)}",
    ]
    found = pair.divergence
    if found is not None:
        lines += [
            f"  parts at token {found.token}, in {escape(found.place)}",
            f"    both     {_quoted(found.before_text)}",
            f"    turn {pair.turn:<3} {_quoted(found.text)}",
            f"    turn {pair.turn + 1:<3} {_quoted(found.next_text)}",
            f"  [bold]cause[/]   {found.cause.value}: {escape(found.meaning)}",
            f"          {escape(found.detail)}",
            f"  [bold]mend[/]    {escape(found.mend)}",
        ]
    return lines


_HOW = {
    KnownBy.TOKENS: "its own tokens",
    KnownBy.MESSAGE: "as the template writes it",
    KnownBy.NEXT_TURN: "as the later turn has it",
}


def _answer(pair: Pair) -> str:
    if pair.answer is not None and pair.answer_known_by is not None:
        counts = f"{pair.answer.common_tokens} of {pair.answer.tokens} tokens"
        return f"{counts} (expected; {_HOW[pair.answer_known_by]})"
    if pair.answer_known_by is not None:
        return "lost from its beginning: its reasoning is not in the later turn"
    return "not known, so not checked" if pair.extends else "not known"


def _quoted(text: str) -> str:
    # Blanks and line ends are often all that differs.
    return escape(repr(text)) if text else "(nothing more)"
