"""The page's routes: its files, and the state that it asks for again and again.

The page polls, and each answer has only what has changed: a reader that is slow or has left costs nothing, and no
open stream keeps a gateway that drains.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from toolgap.gateway.page.timeline import Timeline

PATH = "/toolgap"
STATE_PATH = "/toolgap/state"

STATIC = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer: only what the gateway itself serves is loaded, and nothing is run that stands in the page."""


def routes(timeline: Timeline) -> list[BaseRoute]:
    """What shows a timeline: the page, its files below it, and its state."""

    # Not a coroutine function: starlette then runs it in a thread, beside the streams.
    def state(request: Request) -> Response:
        epoch = request.query_params.get("epoch")
        body = timeline.state(_number(request.query_params.get("since", "")), epoch)
        return Response(body, headers={**HEADERS, "Cache-Control": "no-store"}, media_type="application/json")

    return [
        _file(PATH, "page.html", "text/html; charset=utf-8"),
        Route(STATE_PATH, state),
        *(_file(f"{PATH}/{name}", name, media_type) for name, media_type in STATIC.items()),
    ]


def _file(path: str, name: str, media_type: str) -> Route:
    content = (files(__package__) / "static" / name).read_bytes()

    async def serve(request: Request) -> Response:
        # A page of an older gateway would not understand this one's state.
        return Response(content, headers={**HEADERS, "Cache-Control": "no-cache"}, media_type=media_type)

    return Route(path, serve, name=name)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
