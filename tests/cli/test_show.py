"""What a person is shown of an operation."""

import pytest
from command import RESTORED, Server, operation, reply, run, serving, words

from toolgap.cli.show import operation_rows
from toolgap.protocol import Code, Divergence, Error, ErrorReply, Estimate, Reason, State
from toolgap.terminal import Exit

ESTIMATE = Estimate(
    missing_tokens=992,
    restore_s=0.5,
    recompute_s=0.25,
    gap_s=0.125,
    queued_tokens=0,
    restore_tokens_per_s=2000.0,
    prefill_tokens_per_s=4000.0,
    worthwhile=False,
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return serving(monkeypatch)


def test_what_is_not_known_is_left_out() -> None:
    rows = operation_rows(RESTORED)
    absent = ("parts", "promoted", "leased", "expected", "continuation", "replica")
    assert [name for name in absent if rows[name] is not None] == []
    assert rows["used"] == "0 tokens"


def test_a_prefix_by_messages_has_parts() -> None:
    assert operation_rows(operation(stable_tokens=900, expected_tokens=100))["parts"] == (
        "900 tokens were a prompt, 100 are the answer as it is expected"
    )


def test_an_estimate_in_a_phrase() -> None:
    assert operation_rows(operation(estimate=ESTIMATE))["expected"] == (
        "992 tokens to restore in 0.5 s or to recompute in 0.25 s, 0.125 s before the continuation: not worthwhile"
    )


def test_what_is_waited_for_stands_behind_the_state() -> None:
    waiting = operation(queued=True, stopping=True)
    assert operation_rows(waiting)["state"] == "restoring (stopping, waits for its turn)"
    assert operation_rows(operation(following=True))["state"] == "restoring (follows another's read)"


def test_a_continuation_that_took_all() -> None:
    rows = operation_rows(operation(State.RESTORED, Reason.COMPLETE, matched_tokens=1000, used_after_s=2.5))
    assert rows["continuation"] == "begins with all 1000 tokens"
    assert rows["used"] == "0 tokens, after 2.500 s"


def test_a_continuation_that_left_the_prefix(server: Server) -> None:
    divergence = Divergence(
        submitted_ids=[151667, 271],
        prompted_ids=[3925],
        submitted_text="<think>\n\n",
        prompted_text="[red]OK",
    )
    status = operation(
        State.RESTORED,
        Reason.COMPLETE,
        matched_tokens=640,
        first_divergent_token=640,
        divergence=divergence,
    )
    server.reply = lambda _: reply(status)
    shown = words(run("status", "op-1").stdout)
    assert "begins with 640 tokens, and differs from token 640 on:" in shown
    assert r'submitted "<think>\n\n" (151667 271)' in shown
    assert 'prompted "[red]OK" (3925)' in shown


def test_sides_that_are_not_decoded() -> None:
    divergence = Divergence(submitted_ids=[1, 2], prompted_ids=[])
    rows = operation_rows(operation(matched_tokens=16, first_divergent_token=16, divergence=divergence))
    assert (rows["  submitted"], rows["  prompted"]) == ("1 2", "nothing more")


def test_a_refusal_says_what_was_expected(server: Server) -> None:
    error = Error(code=Code.NOT_WORTHWHILE, message="a recompute is as fast", estimate=ESTIMATE)
    server.reply = lambda _: reply(ErrorReply(error=error), 409)
    result = run("submit", "--text", "a")
    assert result.exit_code == Exit.REFUSED
    assert "to recompute in 0.25 s" in words(result.stderr)
