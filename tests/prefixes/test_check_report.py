"""The report: what passes, and what a person reads."""

import io

import msgspec
import pytest
from rich.console import Console

from toolgap.prefixes.causes import CAUSES, Cause
from toolgap.prefixes.report import KnownBy, Pair, Portion, Report, divergence, print_report


def pair(common: int = 100, extends: bool = True) -> Pair:
    return Pair(
        session="s[1]",
        turn=1,
        tokens=100,
        next_tokens=150,
        common_tokens=common,
        common_page_tokens=common // 16 * 16,
        page_tokens=16,
        share=common / 100,
        prompt=Portion(tokens=90, common_tokens=min(common, 90)),
        answer=Portion(tokens=10, common_tokens=max(common - 90, 0)),
        answer_known_by=KnownBy.TOKENS,
        extends=extends,
        divergence=None
        if extends
        else divergence(
            Cause.ARGUMENTS,
            token=common,
            place="messages[2].tool_calls[0].function.arguments",
            before_text="[bold]",
            text='"city"',
            next_text="",
            detail="The arguments of 'find' are the same JSON, written differently.",
        ),
    )


def printed(*pairs: Pair, min_share: float = 1.0) -> str:
    out = io.StringIO()
    report = Report(ok=all(p.is_enough(min_share) for p in pairs), min_share=min_share, pairs=list(pairs))
    print_report(report, Console(file=out, width=500))
    return out.getvalue()


@pytest.mark.parametrize(
    ("found", "min_share", "enough"),
    [
        (pair(), 1.0, True),
        (pair(97, extends=False), 1.0, False),
        (pair(97, extends=False), 0.97, True),
        (pair(97, extends=False), 0.98, False),
        (pair(100, extends=False), 1.0, False),
    ],
)
def test_what_is_enough(found: Pair, min_share: float, enough: bool) -> None:
    assert found.is_enough(min_share) is enough


def test_a_turn_that_extends() -> None:
    text = printed(pair())
    assert (
        "session s[1], turn 2 extends turn 1: 100 of 100 tokens in common (100.0%; 96 in whole pages" in text
    )
    assert "Every turn extends the one before it." in text


def test_a_turn_that_does_not() -> None:
    text = printed(pair(), pair(95, extends=False))
    meaning, mend = CAUSES[Cause.ARGUMENTS]
    for words in ("prompt  90 of 90 tokens (stable)", "answer  5 of 10 tokens (expected; its own tokens)"):
        assert words in text
    for words in (meaning, mend, "arguments_reserialised", "'[bold]'", "(nothing more)"):
        assert words in text
    assert "1 of 2 turns does not extend the one before." in text


@pytest.mark.parametrize(
    ("answer", "known_by", "words"),
    [
        (
            Portion(tokens=10, common_tokens=10),
            KnownBy.MESSAGE,
            "10 of 10 tokens (expected; as the template writes it)",
        ),
        (
            Portion(tokens=9, common_tokens=9),
            KnownBy.NEXT_TURN,
            "9 of 9 tokens (expected; as the later turn has it)",
        ),
        (None, KnownBy.MESSAGE, "lost from its beginning"),
        (None, None, "not known, so not checked"),
    ],
)
def test_what_is_known_of_the_answer(answer: Portion | None, known_by: KnownBy | None, words: str) -> None:
    assert words in printed(msgspec.structs.replace(pair(), answer=answer, answer_known_by=known_by))


def test_a_share_is_told() -> None:
    assert "with less than 90% in common" in printed(pair(95, extends=False), min_share=0.9)
