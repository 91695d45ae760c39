"""Asking a running server."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from toolgap.client import REQUEST_TIMEOUT_S, Toolgap, ToolgapError, ToolgapUnreachable, connection
from toolgap.protocol import Error, Overview


class ServerAnswers(NamedTuple):
    """What a server said."""

    url: str
    info_status: int
    info: Mapping[str, Any] | None
    """``/server_info``, if it could be read."""
    endpoint_status: int
    overview: Overview | None
    error: Error | None
    """Why Toolgap refused the overview."""


def ask_server(url: str, api_key: str | None, transport: httpx.BaseTransport | None = None) -> ServerAnswers:
    """Ask a running server for its set-up and for Toolgap's overview.

    Raises:
        ToolgapUnreachable: nobody answers.
        ValueError: the URL or the key cannot be used.
    """
    overview, error, status = None, None, int(httpx.codes.OK)
    with Toolgap(url, api_key=api_key, transport=transport) as toolgap:
        try:
            overview = toolgap.overview()
        except ToolgapError as refusal:
            error, status = refusal.error, refusal.status_code
        except ToolgapUnreachable as foreign:
            if foreign.status_code is None:
                raise
            status = foreign.status_code
    info_status, info = _ask_info(url, api_key, transport)
    return ServerAnswers(url, info_status, info, status, overview, error)


def _ask_info(
    url: str, api_key: str | None, transport: httpx.BaseTransport | None
) -> tuple[int, dict[str, Any] | None]:
    try:
        with httpx.Client(**connection(url, api_key), transport=transport, timeout=REQUEST_TIMEOUT_S) as http:
            reply = http.get("/server_info")
    except httpx.TransportError as error:
        raise ToolgapUnreachable(f"no answer from {url}/server_info: {error}") from error
    try:
        info = reply.json() if reply.is_success else None
    except ValueError:
        info = None
    return reply.status_code, info if isinstance(info, dict) else None
