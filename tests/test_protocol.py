"""What a request body may say: every refusal has a code, an HTTP status and the field that is wrong."""

import ast
import json
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolgap import protocol
from toolgap.protocol import (
    CODES,
    MAX_TTL_S,
    MAX_WAIT_S,
    REASONS,
    RETRY_AFTER_S,
    STATES,
    UNSUPPORTED_FIELDS,
    Cancel,
    Code,
    Command,
    EngineStatus,
    Error,
    ErrorReply,
    OperationStatus,
    Overview,
    Reason,
    Refused,
    Resolve,
    Retry,
    State,
    Status,
    Submit,
    decode_command,
)

IDS = [1, 2, 3]


def body(action: str, **fields: Any) -> bytes:
    return json.dumps({"action": action, **fields}).encode()


def refusal(content: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        decode_command(content)
    return caught.value


# ---- what is accepted ----


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (body("submit", input_ids=IDS), Submit(input_ids=IDS)),
        (body("submit", text="a prompt"), Submit(text="a prompt")),
        (body("submit", input_ids=[0, 2**31 - 1]), Submit(input_ids=[0, 2**31 - 1])),
        (
            body(
                "submit", input_ids=IDS, operation_id="turn-7", extra_key="a", cache_salt="b", namespace="c"
            ),
            Submit(input_ids=IDS, operation_id="turn-7", extra_key="a", cache_salt="b", namespace="c"),
        ),
        (body("submit", input_ids=IDS, ttl_s=2), Submit(input_ids=IDS, ttl_s=2.0)),
        (body("submit", input_ids=IDS, ttl_s=0.001), Submit(input_ids=IDS, ttl_s=0.001)),
        (body("submit", input_ids=IDS, ttl_s=MAX_TTL_S), Submit(input_ids=IDS, ttl_s=MAX_TTL_S)),
        (body("status"), Status()),
        (body("status", operation_id="x"), Status(operation_id="x")),
        (body("status", operation_id="x", wait_s=0), Status(operation_id="x", wait_s=0.0)),
        (body("status", operation_id="x", wait_s=MAX_WAIT_S), Status(operation_id="x", wait_s=MAX_WAIT_S)),
        (body("cancel", operation_id="x"), Cancel(operation_id="x")),
        (b' \n{ "operation_id" : "x" , "action" : "cancel" }\n', Cancel(operation_id="x")),
    ],
)
def test_a_well_formed_body_becomes_its_command(content: bytes, command: Command) -> None:
    assert decode_command(content) == command


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    optional = [name for name in Submit.__struct_fields__ if name not in ("input_ids", *UNSUPPORTED_FIELDS)]
    sent = dict.fromkeys([*optional, *UNSUPPORTED_FIELDS])
    command = decode_command(body("submit", input_ids=IDS, **sent))
    assert isinstance(command, Submit)
    assert [getattr(command, name) for name in optional] == [None] * len(optional)
    assert decode_command(body("status", operation_id=None, wait_s=None)) == Status()


@pytest.mark.parametrize("operation_id", ["x", "a" * 128, "turn-7", "A.b_c:d-9"])
def test_an_operation_id_may_be_any_short_name(operation_id: str) -> None:
    for content in (
        body("submit", input_ids=IDS, operation_id=operation_id),
        body("status", operation_id=operation_id),
        body("cancel", operation_id=operation_id),
    ):
        command = decode_command(content)
        assert not isinstance(command, Resolve)
        assert command.operation_id == operation_id


CHAT = [{"role": "user", "content": "What is in this folder?"}]


@pytest.mark.parametrize("action", ["submit", "resolve"])
@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": IDS},
        {"text": "a prompt"},
        {"request_id": "chatcmpl-1"},
        {"messages": CHAT},
        {"messages": CHAT, "api": "anthropic", "system": "Be brief.", "thinking": {"type": "disabled"}},
        {"messages": CHAT, "tools": [{"type": "function"}], "tool_choice": "auto", "model": "m"},
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": 0.5},
        {
            "messages": CHAT,
            "continue_final_message": True,
            "response_format": {"type": "text"},
            "task": "query",
        },
        {"input_ids": IDS, "extra_key": "a", "cache_salt": "b", "lora_path": "l", "routed_dp_rank": 1},
        {"request_id": "x", "routed_dp_rank": 0},
    ],
)
def test_a_prefix_may_be_named_in_any_of_four_ways(action: str, fields: dict[str, Any]) -> None:
    command = decode_command(body(action, **fields))
    assert isinstance(command, Submit if action == "submit" else Resolve)
    assert {name: getattr(command, name) for name in fields} == fields


# ---- what is refused ----


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b" \n", id="blank"),
        pytest.param(b"{", id="truncated"),
        pytest.param(b'{"action": "submit", "input_ids": [1, 2', id="truncated-ids"),
        pytest.param(b'{"action": "status"} {"action": "status"}', id="two-objects"),
        pytest.param(b'{"action": "status",}', id="trailing-comma"),
        pytest.param(b"{'action': 'status'}", id="single-quotes"),
        pytest.param(b"action=status", id="form"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b'{"action": "submit", "text": "\xff"}', id="not-utf-8"),
        pytest.param(b'{"action": "submit", "input_ids": [1], "ttl_s": NaNo}', id="not-quite-nan"),
        pytest.param(b'{"action": "submit", "input_ids": [1], "ttl_s": .5}', id="no-leading-digit"),
        pytest.param(b'{"action": "submit", "input_ids": [01]}', id="leading-zero"),
    ],
)
def test_what_is_no_json_is_malformed(content: bytes) -> None:
    refused = refusal(content)
    assert (refused.error.code, refused.status, refused.error.field) == (Code.MALFORMED_JSON, 400, None)
    assert "not JSON" in refused.error.message


@pytest.mark.parametrize("content", [b"null", b"1", b'"submit"', b"[]", b"[NaN]", b"NaN", b"true"])
def test_json_that_is_no_object_is_refused(content: bytes) -> None:
    refused = refusal(content)
    assert refused.status == 400
    assert "object" in refused.error.message


BAD_FIELDS = [
    # the action
    pytest.param({}, "action", id="no-action"),
    pytest.param({"Action": "submit"}, "action", id="action-in-another-case"),
    pytest.param({"action": None}, "action", id="action-null"),
    pytest.param({"action": 1}, "action", id="action-number"),
    pytest.param({"action": ["submit"]}, "action", id="action-array"),
    pytest.param({"action": "SUBMIT"}, "action", id="action-upper-case"),
    pytest.param({"action": "explode"}, "action", id="action-unknown"),
    pytest.param({"action": ""}, "action", id="action-empty"),
    # input_ids
    pytest.param({"action": "submit", "input_ids": []}, "input_ids", id="ids-empty"),
    pytest.param({"action": "submit", "input_ids": "1 2"}, "input_ids", id="ids-string"),
    pytest.param({"action": "submit", "input_ids": 1}, "input_ids", id="ids-number"),
    pytest.param({"action": "submit", "input_ids": {"0": 1}}, "input_ids", id="ids-object"),
    pytest.param({"action": "submit", "input_ids": True}, "input_ids", id="ids-bool"),
    pytest.param({"action": "submit", "input_ids": [[1, 2], [3]]}, "input_ids[0]", id="ids-batch"),
    pytest.param({"action": "submit", "input_ids": [1, "2"]}, "input_ids[1]", id="id-string"),
    pytest.param({"action": "submit", "input_ids": [1, None]}, "input_ids[1]", id="id-null"),
    pytest.param({"action": "submit", "input_ids": [True]}, "input_ids[0]", id="id-bool"),
    pytest.param({"action": "submit", "input_ids": [1, 2, 2.5]}, "input_ids[2]", id="id-fraction"),
    pytest.param({"action": "submit", "input_ids": [2.0]}, "input_ids[0]", id="id-float"),
    pytest.param({"action": "submit", "input_ids": [-1]}, "input_ids[0]", id="id-negative"),
    pytest.param({"action": "submit", "input_ids": [2**31]}, "input_ids[0]", id="id-over-int32"),
    pytest.param({"action": "submit", "input_ids": [2**64]}, "input_ids[0]", id="id-over-int64"),
    pytest.param({"action": "submit", "input_ids": [1, -(10**400)]}, "input_ids[1]", id="id-astronomic"),
    pytest.param({"action": "submit", "input_ids": [float("nan")]}, "input_ids[0]", id="id-nan"),
    # text
    pytest.param({"action": "submit", "text": ""}, "text", id="text-empty"),
    pytest.param({"action": "submit", "text": 5}, "text", id="text-number"),
    pytest.param({"action": "submit", "text": ["a"]}, "text", id="text-array"),
    # exactly one of the two
    pytest.param({"action": "submit"}, "input_ids", id="neither"),
    pytest.param({"action": "submit", "input_ids": None, "text": None}, "input_ids", id="both-null"),
    pytest.param({"action": "submit", "input_ids": IDS, "text": "a"}, "input_ids", id="both"),
    pytest.param({"action": "submit", "input_ids": [], "text": "a"}, "input_ids", id="both-ids-empty"),
    pytest.param({"action": "submit", "input_ids": IDS, "text": ""}, "input_ids", id="both-text-empty"),
    pytest.param({"action": "submit", "text": "a", "request_id": "b"}, "text", id="text-and-request"),
    pytest.param(
        {"action": "submit", "messages": CHAT, "request_id": "b"}, "messages", id="messages-and-request"
    ),
    pytest.param({"action": "resolve"}, "input_ids", id="resolve-nothing"),
    # messages, and what stands beside them
    pytest.param({"action": "submit", "messages": []}, "messages", id="messages-empty"),
    pytest.param({"action": "submit", "messages": "hello"}, "messages", id="messages-string"),
    pytest.param({"action": "submit", "messages": ["hello"]}, "messages[0]", id="messages-of-strings"),
    pytest.param({"action": "submit", "messages": CHAT, "api": "gemini"}, "api", id="api-unknown"),
    pytest.param({"action": "submit", "messages": CHAT, "tools": {}}, "tools", id="tools-object"),
    pytest.param({"action": "submit", "input_ids": IDS, "tools": [{}]}, "tools", id="tools-beside-ids"),
    pytest.param({"action": "submit", "text": "a", "api": "openai"}, "api", id="api-beside-text"),
    pytest.param({"action": "submit", "request_id": "a", "model": "m"}, "model", id="model-beside-request"),
    pytest.param({"action": "submit", "request_id": ""}, "request_id", id="request-empty"),
    pytest.param({"action": "submit", "request_id": 1}, "request_id", id="request-number"),
    pytest.param(
        {"action": "submit", "request_id": "a", "cache_salt": "s"}, "cache_salt", id="salt-beside-request"
    ),
    pytest.param(
        {"action": "resolve", "request_id": "a", "lora_path": "l"}, "lora_path", id="lora-beside-request"
    ),
    pytest.param({"action": "resolve", "input_ids": IDS, "ttl_s": 1}, "ttl_s", id="resolve-with-ttl"),
    # ttl_s
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": 0}, "ttl_s", id="ttl-zero"),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": -0.0}, "ttl_s", id="ttl-minus-zero"),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": -1}, "ttl_s", id="ttl-negative"),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": float("nan")}, "ttl_s", id="ttl-nan"),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": float("inf")}, "ttl_s", id="ttl-infinity"),
    pytest.param(
        {"action": "submit", "input_ids": IDS, "ttl_s": float("-inf")}, "ttl_s", id="ttl-minus-infinity"
    ),
    pytest.param(
        {"action": "submit", "input_ids": IDS, "ttl_s": MAX_TTL_S + 0.5}, "ttl_s", id="ttl-too-long"
    ),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": 10**400}, "ttl_s", id="ttl-astronomic"),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": "60"}, "ttl_s", id="ttl-string"),
    pytest.param({"action": "submit", "input_ids": IDS, "ttl_s": True}, "ttl_s", id="ttl-bool"),
    # the other fields of submit
    pytest.param({"action": "submit", "input_ids": IDS, "extra_key": 1}, "extra_key", id="extra-key-number"),
    pytest.param(
        {"action": "submit", "input_ids": IDS, "cache_salt": []}, "cache_salt", id="cache-salt-array"
    ),
    pytest.param({"action": "submit", "input_ids": IDS, "namespace": {}}, "namespace", id="namespace-object"),
    # wait_s
    pytest.param({"action": "status", "operation_id": "x", "wait_s": -1}, "wait_s", id="wait-negative"),
    pytest.param(
        {"action": "status", "operation_id": "x", "wait_s": MAX_WAIT_S + 1}, "wait_s", id="wait-too-long"
    ),
    pytest.param({"action": "status", "operation_id": "x", "wait_s": float("nan")}, "wait_s", id="wait-nan"),
    pytest.param(
        {"action": "status", "operation_id": "x", "wait_s": float("inf")}, "wait_s", id="wait-infinity"
    ),
    pytest.param({"action": "status", "operation_id": "x", "wait_s": "1"}, "wait_s", id="wait-string"),
    pytest.param({"action": "status", "operation_id": "x", "wait_s": False}, "wait_s", id="wait-bool"),
    pytest.param({"action": "status", "wait_s": 1}, "wait_s", id="wait-without-id"),
    pytest.param({"action": "status", "wait_s": 0}, "wait_s", id="no-wait-without-id"),
    # operation_id
    pytest.param({"action": "cancel"}, "operation_id", id="cancel-without-id"),
    pytest.param({"action": "cancel", "operation_id": None}, "operation_id", id="cancel-null"),
    pytest.param({"action": "submit", "input_ids": IDS, "operation_id": 7}, "operation_id", id="id-number"),
    # fields of another action, and of none
    pytest.param({"action": "status", "input_ids": IDS}, "input_ids", id="status-with-ids"),
    pytest.param({"action": "cancel", "operation_id": "x", "wait_s": 1}, "wait_s", id="cancel-with-wait"),
    pytest.param({"action": "submit", "input_ids": IDS, "surprise": 1}, "surprise", id="unknown"),
    pytest.param(
        {"action": "submit", "input_ids": IDS, "inputIds": IDS}, "inputIds", id="unknown-in-another-case"
    ),
    pytest.param({"action": "status", "surprise": float("nan")}, "surprise", id="unknown-nan"),
]


@pytest.mark.parametrize(("sent", "field"), BAD_FIELDS)
def test_a_bad_field_is_refused_and_named(sent: dict[str, Any], field: str) -> None:
    refused = refusal(json.dumps(sent).encode())
    assert (refused.error.code, refused.status, refused.error.field) == (Code.INVALID_FIELD, 400, field)
    assert field.partition("[")[0] in refused.error.message
    assert refused.error.retry_after_s is None


@pytest.mark.parametrize("action", ["submit", "status", "cancel"])
@pytest.mark.parametrize(
    "operation_id", ["", "a" * 129, "a b", "a/b", "a\tb", "é", "a;b", "../x", "\N{ROBOT FACE}"]
)
def test_an_operation_id_with_other_characters_is_refused(action: str, operation_id: str) -> None:
    ids = {"input_ids": IDS} if action == "submit" else {}
    refused = refusal(body(action, operation_id=operation_id, **ids))
    assert (refused.error.code, refused.error.field) == (Code.INVALID_FIELD, "operation_id")


def test_the_wrong_value_is_repeated_to_the_caller() -> None:
    assert "not -3" in refusal(body("submit", input_ids=IDS, ttl_s=-3)).error.message
    assert "86400" in refusal(body("submit", input_ids=IDS, ttl_s=1e9)).error.message
    assert "300" in refusal(body("status", operation_id="x", wait_s=301)).error.message
    assert "submit, status, cancel or resolve" in refusal(body("explode")).error.message


@pytest.mark.parametrize(
    "value", ["x", "", 0, 1, False, [], {}, [{"role": "user", "content": [1, None]}], 1.5]
)
@pytest.mark.parametrize("field", UNSUPPORTED_FIELDS)
def test_a_field_of_a_later_release_is_named(field: str, value: Any) -> None:
    for prefix in ({"input_ids": IDS}, {"text": "a"}, {}):
        refused = refusal(body("submit", **prefix, **{field: value}))
        assert (refused.error.code, refused.status, refused.error.field) == (Code.NOT_SUPPORTED, 501, field)
        assert field in refused.error.message
        assert UNSUPPORTED_FIELDS[field] in refused.error.message


def test_every_field_of_submit_is_either_supported_or_named_as_unsupported() -> None:
    unset = {name for name in Submit.__struct_fields__ if getattr(Submit(), name) is msgspec.UNSET}
    assert unset == UNSUPPORTED_FIELDS.keys()


@pytest.mark.parametrize("image", [[[[[{}]]]], {"a": [{"b": None}] * 50}, [1e300, -0.0, "\x00", "\\"]])
def test_nested_garbage_in_an_unsupported_field_is_not_looked_into(image: Any) -> None:
    assert refusal(body("submit", input_ids=IDS, image_data=image)).error.field == "image_data"


def test_non_finite_numbers_do_not_hide_another_error() -> None:
    assert refusal(b'{"action": "submit", "ttl_s": NaN}').error.field == "input_ids"
    assert refusal(b'{"action": "submit", "ttl_s": NaN, "x": 1, "input_ids": [1]}').error.field == "x"
    assert refusal(b'{"action": "explode", "ttl_s": NaN}').error.field == "action"


# ---- arbitrary input ----


def decode_or_refuse(content: bytes) -> Command | Refused:
    """The only two things that may come of a body; anything else propagates."""
    try:
        return decode_command(content)
    except Refused as caught:
        refused = caught
    assert refused.error.code in (Code.MALFORMED_JSON, Code.INVALID_FIELD, Code.NOT_SUPPORTED)
    assert refused.status == CODES[refused.error.code].status
    assert refused.status in (400, 501)
    assert refused.error.message
    reply = msgspec.json.encode(ErrorReply(error=refused.error))
    assert msgspec.json.decode(reply, type=ErrorReply).error == refused.error
    return refused


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(
    {
        *Submit.__struct_fields__,
        *Status.__struct_fields__,
        *Cancel.__struct_fields__,
        *Resolve.__struct_fields__,
    }
)
VALUE: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([[{}]])
)
IDENTIFIER = st.text("azAZ09._:-", min_size=1, max_size=130)
FIELD = st.one_of(
    st.tuples(st.sampled_from([*FIELDS, "surprise"]), VALUE),
    st.tuples(st.just("operation_id"), IDENTIFIER),
    st.tuples(st.just("input_ids"), st.lists(st.integers(-1, 2**31), min_size=1, max_size=3)),
    st.tuples(st.just("ttl_s"), st.floats(-1, 90_000)),
    st.tuples(st.just("wait_s"), st.floats(-1, 400)),
)
NEARLY = st.builds(
    lambda action, fields: {"action": action} | dict(fields),
    st.sampled_from(["submit", "status", "cancel", "resolve"]) | VALUE,
    st.lists(FIELD, max_size=4),
)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b'{"action":"submit","input_ids":[' + b"9" * 5000 + b"]}")
@example(b'{"action":"submit","input_ids":[1],"ttl_s":1e999}')
def test_arbitrary_bytes_are_decoded_or_refused(content: bytes) -> None:
    decode_or_refuse(content)


@settings(deadline=None)
@given(JSON)
def test_arbitrary_json_is_refused(value: Any) -> None:
    assert isinstance(decode_or_refuse(json.dumps(value).encode()), Refused)


@settings(deadline=None, max_examples=200)
@given(NEARLY)
def test_nearly_right_bodies_are_decoded_or_refused(sent: dict[str, Any]) -> None:
    command = decode_or_refuse(json.dumps(sent).encode())
    if isinstance(command, Submit):
        assert (command.input_ids is None) != (command.text is None)
        assert command.input_ids or command.text
        assert command.ttl_s is None or 0 < command.ttl_s <= MAX_TTL_S
        assert all(getattr(command, name) in (msgspec.UNSET, None) for name in UNSUPPORTED_FIELDS)
    elif isinstance(command, Status):
        assert command.wait_s is None or (command.operation_id and 0 <= command.wait_s <= MAX_WAIT_S)


@settings(deadline=None)
@given(content=st.binary(max_size=60), cut=st.integers(0, 60))
def test_a_damaged_body_is_decoded_or_refused(content: bytes, cut: int) -> None:
    whole = body("submit", input_ids=IDS, operation_id="turn-7", ttl_s=60)
    decode_or_refuse(whole[:cut] + content + whole[cut + len(content) :])


@settings(deadline=None)
@given(
    st.builds(
        Submit,
        input_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
        operation_id=st.none() | IDENTIFIER.filter(lambda name: len(name) <= 128),
        extra_key=st.none() | st.text(),
        cache_salt=st.none() | st.text(),
        ttl_s=st.none() | st.floats(0, MAX_TTL_S, exclude_min=True),
        namespace=st.none() | st.text(),
    )
    | st.builds(Submit, text=st.text(min_size=1))
)
def test_a_command_survives_the_wire(command: Submit) -> None:
    assert decode_command(msgspec.json.encode(command)) == command


# ---- what callers and documents rely on ----


def test_states_reasons_and_codes_are_documented() -> None:
    assert STATES.keys() == set(State)
    assert REASONS.keys() == set(Reason)
    assert CODES.keys() == set(Code)
    texts = [*STATES.values(), *REASONS.values(), *(refusal.meaning for refusal in CODES.values())]
    assert all(text.endswith(".") and text == text.strip() for text in texts)
    assert len(set(STATES.values())) == len(STATES)
    assert len(set(REASONS.values())) == len(REASONS)


def test_terminal_states() -> None:
    assert [state for state in State if not state.terminal] == [State.QUERYING, State.RESTORING]


@pytest.mark.parametrize(
    ("status", "codes"),
    [
        (400, {Code.MALFORMED_JSON, Code.INVALID_FIELD, Code.BODY_TOO_LARGE}),
        (404, {Code.UNKNOWN_OPERATION, Code.UNKNOWN_REQUEST}),
        (
            409,
            {
                Code.OPERATION_CONFLICT,
                Code.NAMESPACE_MISMATCH,
                Code.STORAGE_REPLACED,
                Code.STORAGE_STALE,
                Code.ANCHOR_NOT_BACKED_UP,
                Code.NOT_WORTHWHILE,
            },
        ),
        (
            429,
            {
                Code.TOO_MANY_OPERATIONS,
                Code.PREFIX_TOO_LARGE,
                Code.HOST_BUDGET,
                Code.LEASE_BUDGET,
                Code.RATE_LIMITED,
                Code.AWAITED_KV,
            },
        ),
        (500, {Code.INTERNAL_ERROR}),
        (501, {Code.NOT_SUPPORTED}),
        (503, {Code.PAUSED, Code.FLUSH_PENDING, Code.STORAGE_STALLED, Code.ENGINE_BUSY}),
    ],
)
def test_each_code_has_one_http_status(status: int, codes: set[Code]) -> None:
    assert {code for code, refusal in CODES.items() if refusal.status == status} == codes
    assert all(Refused(code, "why").status == status for code in codes)


def test_every_code_has_an_error_status() -> None:
    statuses = [refusal.status for refusal in CODES.values()]
    assert all(isinstance(status, HTTPStatus) and 400 <= status < 600 for status in statuses)


@pytest.mark.parametrize("code", Code)
def test_a_refusal_says_whether_to_try_again(code: Code) -> None:
    told = Refused(code, "why", retry_after_s=2.5) if CODES[code].retry is not Retry.NO else None
    match CODES[code].retry:
        case Retry.YES:
            assert Refused(code, "why").error.retry_after_s == RETRY_AFTER_S
        case Retry.IF_TOLD:
            assert Refused(code, "why").error.retry_after_s is None
        case Retry.NO:
            assert Refused(code, "why").error.retry_after_s is None
            with pytest.raises(AssertionError, match=code):
                Refused(code, "why", retry_after_s=2.5)
    assert told is None or told.error.retry_after_s == 2.5


def test_no_refusal_of_the_source_breaks_its_codes_promise() -> None:
    """Also those that no test provokes: the assertion would turn them into a fault."""
    found = set()
    source = Path(protocol.__file__).parent
    # The gateway's Refused is an event, of any server's code.
    for path in set(source.rglob("*.py")) - set((source / "gateway").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name("Refused"),
                    args=[ast.Attribute(ast.Name("Code"), name), *_],
                    keywords=keywords,
                ):
                    found.add(Code[name])
                    told = any(keyword.arg == "retry_after_s" for keyword in keywords)
                    assert not (told and CODES[Code[name]].retry is Retry.NO), (path.name, node.lineno)
                case ast.Call(func=ast.Name("Refused")):
                    raise AssertionError(f"{path.name}:{node.lineno} hides its code")
    assert found >= set(Code) - {Code.LEASE_BUDGET}


def test_what_passes_by_itself_is_worth_trying_again() -> None:
    """A full limit, a pause and a busy engine pass; what the caller sent, or the set-up, does not."""
    by_retry = {retry: {code for code in Code if CODES[code].retry is retry} for retry in Retry}
    assert by_retry[Retry.YES] == {
        Code.ANCHOR_NOT_BACKED_UP,
        Code.TOO_MANY_OPERATIONS,
        Code.HOST_BUDGET,
        Code.LEASE_BUDGET,
        Code.RATE_LIMITED,
        Code.AWAITED_KV,
        Code.PAUSED,
        Code.FLUSH_PENDING,
        Code.STORAGE_STALLED,
        Code.ENGINE_BUSY,
    }
    assert by_retry[Retry.IF_TOLD] == {Code.STORAGE_REPLACED}
    assert all(CODES[code].status != 429 or code is Code.PREFIX_TOO_LARGE for code in by_retry[Retry.NO])


def test_an_error_leaves_out_what_it_does_not_know() -> None:
    refused = Refused(Code.PREFIX_TOO_LARGE, "full")
    assert str(refused) == "full"
    assert msgspec.json.encode(ErrorReply(error=refused.error)) == (
        b'{"error":{"code":"prefix_too_large","message":"full"}}'
    )
    whole = Refused(Code.STORAGE_REPLACED, "why", field="ttl_s", retry_after_s=1.5).error
    assert whole == Error(code=Code.STORAGE_REPLACED, message="why", field="ttl_s", retry_after_s=1.5)


def operation(**fields: Any) -> OperationStatus:
    required: dict[str, Any] = {
        "operation_id": "x",
        "state": State.QUERYING,
        "requested_tokens": 100,
        "aligned_tokens": 96,
        "resident_tokens": 0,
        "ttl_s": 60.0,
        "elapsed_s": 0.0,
        "namespace": "0" * 16,
    }
    return OperationStatus(**required | fields)


def test_a_status_always_has_all_its_fields() -> None:
    """So that a client in any language can read a count without asking whether it is there."""
    sent = msgspec.json.decode(msgspec.json.encode(operation()))
    assert sent.keys() == set(OperationStatus.__struct_fields__)
    assert (sent["state"], sent["reason"], sent["found_tokens"], sent["read_tokens"]) == (
        "querying",
        None,
        None,
        0,
    )


def test_replies_survive_the_wire() -> None:
    ended = operation(state=State.RESTORED, reason=Reason.COMPLETE, read_tokens=96, inserted_tokens=96)
    engine = EngineStatus(
        namespace="0" * 16,
        storage_backend=None,
        prefetch_policy="timeout",
        paused=False,
        **dict.fromkeys(
            (
                name
                for name in EngineStatus.__struct_fields__
                if name not in ("namespace", "storage_backend", "prefetch_policy", "paused")
            ),
            7,
        ),
    )
    for reply in (ended, Overview(active=[operation()], recent=[ended], engine=engine)):
        assert msgspec.json.decode(msgspec.json.encode(reply), type=type(reply)) == reply


def test_every_command_is_tagged_with_its_action() -> None:
    tags = {command.__struct_config__.tag for command in get_args(Command)}
    assert tags == {"submit", "status", "cancel", "resolve"}
    assert {command.__struct_config__.tag_field for command in get_args(Command)} == {"action"}


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "content", [b'{"a":' * 100_000, b'{"action":"submit","input_ids":[1],"image_data":' + DEEP]
)
def test_deep_nesting_is_refused(content: bytes) -> None:
    with pytest.raises(Refused) as refused:
        decode_command(content)
    assert refused.value.error.code is Code.MALFORMED_JSON


@pytest.mark.parametrize("field", ["text", "extra_key", "cache_salt", "namespace"])
def test_lone_surrogates_are_refused(field: str) -> None:
    prefix = {} if field == "text" else {"input_ids": [1]}
    with pytest.raises(Refused):
        decode_command(json.dumps({"action": "submit", **prefix, field: "\ud800"}).encode())


def test_a_refusal_of_a_lone_surrogate_can_be_sent() -> None:
    with pytest.raises(Refused) as refused:
        decode_command(b'{"action": "status", "\\ud800": 1}')
    assert msgspec.json.encode(ErrorReply(error=refused.value.error))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_body_is_utf_8(encoding: str) -> None:
    with pytest.raises(Refused):
        decode_command('{"action": "status"}'.encode(encoding))


@pytest.mark.parametrize("field", ["input-ids", "inp ut", "\u00e9-", "$x"])
def test_an_unknown_field_is_named_whatever_its_characters(field: str) -> None:
    with pytest.raises(Refused) as refused:
        decode_command(json.dumps({"action": "status", field: 1}).encode())
    assert refused.value.error.field == field


def test_an_operation_id_has_no_newline() -> None:
    with pytest.raises(Refused):
        decode_command(b'{"action": "cancel", "operation_id": "a\\n"}')
