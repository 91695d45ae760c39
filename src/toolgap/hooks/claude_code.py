"""A receiver of Claude Code's HTTP hooks (``pip install 'toolgap[claude-code]'``): ``toolgap hooks claude-code``.

Hooks say when tools start and end, and where the transcript is, but neither they nor the transcript have the
system prompt and the tools that every prompt begins with. So the receiver also passes Claude Code's requests
on to SGLang, as they are, and names a prefix by the last request of the session and the answer to it.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from toolgap.client import PrefixFields, connection
from toolgap.hooks.restores import Call, Restores
from toolgap.hooks.tool_calls import Answer
from toolgap.hooks.transcript import answer_that_calls, read_tail, tool_uses
from toolgap.protocol import PROMPT_FIELDS, Api

logger = logging.getLogger("toolgap.hooks")

SESSION_HEADER = "x-claude-code-session-id"
AGENT_HEADER = "x-claude-code-agent-id"
HOOKS_PATH = "/hooks"
EVENTS = (
    *("PreToolUse", "PostToolUse", "PostToolUseFailure", "PostToolBatch"),
    *("PreCompact", "SubagentStop", "SessionEnd"),
)
"""What the receiver does something with."""

MAX_SESSIONS = 256

_HOP_BY_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Conversation(NamedTuple):
    """A session, and the subagent in it that has a conversation of its own."""

    session: str
    agent: str

    @property
    def name(self) -> str:
        """Its name among all."""
        return f"{self.session}/{self.agent}"


class Receiver:
    """What is known of Claude Code's conversations.

    Args:
        restores: Takes their tool calls.
    """

    def __init__(self, restores: Restores) -> None:
        self.restores = restores
        self._requests: OrderedDict[Conversation, PrefixFields] = OrderedDict()
        self._turns: dict[Conversation, PrefixFields] = {}
        self._lock = asyncio.Lock()
        self._hinted = False

    def asked(self, headers: Mapping[str, str], body: bytes) -> None:
        """A request passes on its way to the model."""
        with self.restores.harmless("reading a request"):
            request = json.loads(body)
            if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
                return
            fields = {name: request[name] for name in PROMPT_FIELDS if request.get(name) is not None}
            key = Conversation(headers.get(SESSION_HEADER, ""), headers.get(AGENT_HEADER, ""))
            self._requests[key] = cast("PrefixFields", {**fields, "api": Api.ANTHROPIC})
            self._requests.move_to_end(key)
            if len(self._requests) > MAX_SESSIONS:
                self._end(next(iter(self._requests)))

    async def happened(self, event: Mapping[str, Any]) -> None:
        """A hook's event, in the order in which they come."""
        async with self._lock:
            with self.restores.harmless("reading a hook's event"):
                await self._happened(event)

    async def _happened(self, event: Mapping[str, Any]) -> None:
        key = Conversation(str(event.get("session_id", "")), str(event.get("agent_id") or ""))
        match event.get("hook_event_name"):
            case "PreToolUse":
                await self._tool_starts(key, event)
            case "PostToolUse" | "PostToolUseFailure":
                self.restores.ended(key.name, str(event.get("tool_use_id")))
            case "PostToolBatch":
                for call in event.get("tool_calls") or ():
                    self.restores.ended(key.name, str(call.get("tool_use_id")))
            case "PreCompact" | "SubagentStop":
                self._end(key)
            case "SessionEnd":
                for known in [known for known in self._requests if known.session == key.session]:
                    self._end(known)

    async def _tool_starts(self, key: Conversation, event: Mapping[str, Any]) -> None:
        request = self._requests.get(key)
        if request is None:
            if not self._hinted:
                logger.warning(
                    "no request of session %s came by, so its prefix has no name: let ANTHROPIC_BASE_URL be "
                    "this receiver's URL",
                    key.session,
                )
            self._hinted = True
            return
        call = Call(str(event.get("tool_use_id")), str(event.get("tool_name")))
        if self._turns.get(key) is not request:
            self._turns[key] = request
            path = Path(str(event.get("transcript_path", "")))
            lines = await asyncio.to_thread(read_tail, path)
            message = answer_that_calls(lines, call.id)
            answer = Answer(
                request=request,
                messages=[message] if message else [],
                calls=tool_uses(message["content"]) if message else [call.id],
            )
            self.restores.answered(key.name, answer, [call])
        self.restores.started(key.name, call)

    def _end(self, key: Conversation) -> None:
        self._requests.pop(key, None)
        self._turns.pop(key, None)
        self.restores.closed(key.name)


def application(restores: Restores, url: str) -> Starlette:
    """The receiver as an ASGI application.

    Args:
        restores: Takes the tool calls; closed as the application ends.
        url: SGLang, which the requests are for.
    """
    receiver = Receiver(restores)
    http = httpx.AsyncClient(**{**connection(url, None), "timeout": None})

    async def hook(request: Request) -> Response:
        try:
            event = await request.json()
        except ValueError:
            event = None
        if not isinstance(event, dict):
            return JSONResponse({"error": "a hook's event is a JSON object"}, 400)
        # Claude Code waits for the reply: it comes before anything is looked at.
        return JSONResponse({}, background=BackgroundTask(receiver.happened, event))

    async def pass_on(request: Request) -> Response:
        body = await request.body()
        if request.method == "POST" and request.url.path == "/v1/messages":
            receiver.asked(request.headers, body)
        sent = http.build_request(
            request.method,
            request.url.path,
            params=request.url.query.encode(),
            headers=[item for item in request.headers.raw if item[0].decode() not in _HOP_BY_HOP],
            content=body,
        )
        try:
            reply = await http.send(sent, stream=True)
        except httpx.TransportError as error:
            return JSONResponse(
                {"error": {"type": "api_error", "message": f"no answer from {url}: {error}"}}, 502
            )
        headers = {name: value for name, value in reply.headers.items() if name not in _HOP_BY_HOP}
        return StreamingResponse(
            reply.aiter_raw(), reply.status_code, headers, background=BackgroundTask(reply.aclose)
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await http.aclose()
        await asyncio.to_thread(restores.close)

    routes = [
        Route(HOOKS_PATH, hook, methods=["POST"]),
        Route("/{path:path}", pass_on, methods=["GET", "HEAD", "POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def settings(url: str) -> dict[str, Any]:
    """What goes into Claude Code's ``settings.json`` for a receiver at this URL."""
    hook = {"type": "http", "url": f"{url}{HOOKS_PATH}", "timeout": 5}
    return {
        "env": {"ANTHROPIC_BASE_URL": url, "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"},
        "hooks": {event: [{"hooks": [hook]}] for event in EVENTS},
    }
