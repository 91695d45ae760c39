import logging
from dataclasses import replace

import pytest
from recorder import Recorder, refusal

from toolgap.client import ToolgapError
from toolgap.hooks.restores import Call, Restores, as_restores
from toolgap.hooks.tool_calls import Answer
from toolgap.protocol import Code, State

ANSWER = Answer(request_id="r", request={"messages": [{"role": "user", "content": "x"}]}, calls=["a"])
CALL = Call("a", "test")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_turn_submits_refreshes_and_its_end_cancels_what_still_reads(recorder: Recorder) -> None:
    recorder.default = State.RESTORING
    answer = replace(ANSWER, messages=[{"role": "assistant", "tool_calls": [{"id": "a"}]}])
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("s", answer, [CALL])
        restores.started("s", CALL)
        restores.ended("s", "a", {"role": "tool", "tool_call_id": "a", "content": "done"})
        restores.settle()
        restores.closed("s")
        restores.settle()
    first, second = recorder.submits
    assert first["request_id"] == "r"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert recorder.cancelled == [first["operation_id"], second["operation_id"]]


def test_the_same_prefix_is_not_submitted_again_while_it_is_read(recorder: Recorder) -> None:
    recorder.default = State.RESTORING
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        restores.expected("s", 5.0)
        restores.ended("s", "a")
        restores.settle()
        assert len(recorder.submits) == 1
        assert len(recorder.sent("status")) == 2


def test_the_same_prefix_is_submitted_again_once_it_was_read(recorder: Recorder) -> None:
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        restores.ended("s", "a")
        restores.settle()
    first, second = recorder.submits
    assert first["operation_id"] != second["operation_id"]
    assert recorder.cancelled == []


def test_a_server_that_does_not_know_the_request_is_given_the_messages(recorder: Recorder) -> None:
    recorder.refusals = [refusal(Code.UNKNOWN_REQUEST)]
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        restores.settle()
    by_id, by_messages = recorder.submits
    assert by_id["operation_id"] == by_messages["operation_id"]
    assert by_messages["messages"] == [{"role": "user", "content": "x"}]
    assert not restores.refusals


def test_a_refusal_that_says_when_is_tried_again(recorder: Recorder) -> None:
    recorder.refusals = [refusal(Code.ANCHOR_NOT_BACKED_UP, 0.01)] * 3
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        assert restores.settle()
    assert len(recorder.submits) == 4
    assert len({submit["operation_id"] for submit in recorder.submits}) == 1


def test_a_refusal_is_not_tried_again_for_ever(recorder: Recorder) -> None:
    recorder.refusals = [refusal(Code.ANCHOR_NOT_BACKED_UP, 60.0)]
    with Restores(recorder.client, retry_for_s=1.0) as restores:
        restores.answered("s", ANSWER, [CALL])
        assert restores.settle()
    assert restores.refusals == {Code.ANCHOR_NOT_BACKED_UP: 1}


def test_what_waits_to_be_tried_again_is_taken_back_when_its_session_ends(recorder: Recorder) -> None:
    recorder.refusals = [refusal(Code.TOO_MANY_OPERATIONS, 20.0)]
    with Restores(recorder.client, strict=True) as restores:
        recorder.gate.clear()
        restores.answered("s", ANSWER, [CALL])
        recorder.gate.set()
        assert not restores.settle(0.2)
        restores.closed("s")
        assert restores.settle()
    assert len(recorder.submits) == 1
    assert recorder.cancelled == []


def test_a_restore_that_is_not_worthwhile_is_no_failure(recorder: Recorder) -> None:
    recorder.refusals = [refusal(Code.NOT_WORTHWHILE)]
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        restores.settle()
    assert restores.refusals == {Code.NOT_WORTHWHILE: 1}


def test_an_unreachable_server_is_said_once_and_harms_nobody(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.reachable = False
    with caplog.at_level(logging.WARNING), Restores(recorder.client) as restores:
        for session in "abc":
            restores.answered(session, ANSWER, [CALL])
        assert restores.settle()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_strict_raises_the_failure_out_of_the_next_call(recorder: Recorder) -> None:
    recorder.refusals = [refusal(Code.OPERATION_CONFLICT)]
    restores = Restores(recorder.client, strict=True)
    restores.answered("s", ANSWER, [CALL])
    with pytest.raises(ToolgapError, match="no"):
        restores.settle()
    restores.close()


def test_an_agent_never_waits_and_too_much_is_dropped(recorder: Recorder) -> None:
    recorder.gate.clear()
    with Restores(recorder.client, max_waiting=4, strict=True) as restores:
        for number in range(100):
            restores.answered(f"s{number}", ANSWER, [CALL])
        recorder.gate.set()
        restores.settle()
    assert 4 <= len(recorder.submits) <= 5


def test_a_session_that_was_quiet_longest_is_forgotten_and_cancelled(recorder: Recorder) -> None:
    recorder.default = State.RESTORING
    with Restores(recorder.client, max_sessions=2, strict=True) as restores:
        for session in ("one", "two"):
            restores.answered(session, ANSWER, [CALL])
        restores.settle()
        restores.started("one", Call("b", "test"))
        restores.answered("three", ANSWER, [CALL])
        restores.settle()
        assert recorder.cancelled == [recorder.submits[1]["operation_id"]]


def test_the_gap_is_what_the_tool_took_before(recorder: Recorder) -> None:
    clock = Clock()
    with Restores(recorder.client, clock=clock, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        restores.settle()
        restores.started("s", CALL)
        clock.now_s += 7.0
        restores.ended("s", "a")
        restores.answered("s", ANSWER, [CALL])
        restores.settle()
    assert "expected_gap_s" not in recorder.submits[0]
    assert recorder.submits[-1]["expected_gap_s"] == 7.0


def test_fields_of_every_submit_are_passed_on(recorder: Recorder) -> None:
    with Restores(recorder.client, fields={"ttl_s": 9.0, "cache_salt": "pepper"}, strict=True) as restores:
        restores.answered("s", ANSWER, [CALL])
        restores.settle()
    assert recorder.submits[0]["ttl_s"] == 9.0
    assert recorder.submits[0]["cache_salt"] == "pepper"


def test_a_sessions_name_does_not_show_in_the_server(recorder: Recorder) -> None:
    with Restores(recorder.client, strict=True) as restores:
        restores.answered("alice's session", ANSWER, [CALL])
        restores.settle()
    assert "alice" not in recorder.submits[0]["operation_id"]


def test_a_hooks_own_fault_is_logged_and_not_raised(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> None:
        raise KeyError("x")

    with Restores(recorder.client).harmless("reading"):
        read()
    assert "reading failed" in caplog.text
    with pytest.raises(KeyError), Restores(recorder.client, strict=True).harmless("reading"):
        read()


def test_report_says_what_became_of_every_operation(recorder: Recorder) -> None:
    with Restores(recorder.client) as restores:
        assert restores.report() == "no tool was called"
        restores.answered("s", ANSWER, [CALL])
        assert "restored" in restores.report()


def test_a_closed_one_sends_nothing_more(recorder: Recorder) -> None:
    restores = Restores(recorder.client)
    restores.close()
    restores.answered("s", ANSWER, [CALL])
    assert restores.settle()
    assert recorder.commands == []


def test_hooks_may_share_one(recorder: Recorder) -> None:
    restores = Restores(recorder.client)
    assert as_restores(restores, {}) is restores
    with pytest.raises(TypeError, match="strict"):
        as_restores(restores, {"strict": True})
