"""How the doctor asks a server; what a real one answers is in tests/engine."""

import httpx
import msgspec
import pytest
from doctor_samples import SOUND, answers, overview

from toolgap.client import ToolgapUnreachable
from toolgap.doctor.answers import ServerAnswers, ask_server
from toolgap.protocol import Code, Error, ErrorReply


def test_asking_a_server() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer key"
        if request.url.path == "/server_info":
            return httpx.Response(200, json=SOUND)
        return httpx.Response(200, content=msgspec.json.encode(overview()))

    got = ask_server("http://server:1", "key", httpx.MockTransport(handler))
    assert got == answers()


def test_asking_a_server_that_refuses() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(401, json={"error": "Unauthorized"})
        reply = ErrorReply(error=Error(code=Code.NOT_SUPPORTED, message="why"))
        return httpx.Response(501, content=msgspec.json.encode(reply))

    got = ask_server("http://server:1", None, httpx.MockTransport(handler))
    assert got == ServerAnswers(
        "http://server:1", 401, None, 501, None, Error(code=Code.NOT_SUPPORTED, message="why")
    )


def test_asking_what_is_no_sglang_server() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, html="<p>hello</p>")

    got = ask_server("http://server:1", None, httpx.MockTransport(handler))
    assert (got.info_status, got.info, got.endpoint_status, got.overview) == (200, None, 200, None)


def test_asking_nobody() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ToolgapUnreachable, match="refused"):
        ask_server("http://server:1", None, httpx.MockTransport(handler))
