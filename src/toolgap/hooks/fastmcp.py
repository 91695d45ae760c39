"""A wrapper round the tool calls of a FastMCP client (``pip install 'toolgap[fastmcp]'``)::

    async with Client("https://tools.example/mcp") as client:
        tools = ToolgapTools(client, "http://127.0.0.1:30000")
        completion = await openai.chat.completions.create(...)
        tools.answered(completion.id)
        result = await tools.call_tool("run_tests", {"module": "test_wrap"})

A tool's progress tells when it will end: shortly before, what has left host memory is read again.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fastmcp import Client
from fastmcp.client.client import CallToolResult
from fastmcp.client.progress import ProgressHandler

from toolgap.client import DEFAULT_URL, Toolgap
from toolgap.hooks.gaps import left_s
from toolgap.hooks.restores import Call, Restores, as_restores
from toolgap.hooks.tool_calls import Answer


class ToolgapTools:
    """A client's tools, and one conversation that calls them.

    Args:
        client: The MCP client; stays the caller's to open and close.
        server: Toolgap's URL, a client, or :class:`Restores` that several hooks share.
        session: The conversation's name; made up if left out.
        clock: In seconds.
        **options: Of :class:`Restores`.
    """

    def __init__(
        self,
        client: Client[Any],
        server: str | Toolgap | Restores = DEFAULT_URL,
        *,
        session: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self.client = client
        self.restores = as_restores(server, options)
        self.session = session or uuid.uuid4().hex
        self._clock = clock

    def answered(self, answer: str | Answer) -> None:
        """A model has answered: its chat completion's ``id``, or more that is known of it."""
        with self.restores.harmless("reading an answer"):
            named = Answer(request_id=answer) if isinstance(answer, str) else answer
            self.restores.answered(self.session, named)

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        call_id: str | None = None,
        progress_handler: ProgressHandler | None = None,
        **kwargs: Any,
    ) -> CallToolResult:
        """The client's ``call_tool``: its start submits, its end refreshes.

        Args:
            name: The tool.
            arguments: Its arguments.
            call_id: The id of the model's tool call, if the answer named it.
            progress_handler: Called with the tool's progress too.
            **kwargs: Passed on.
        """
        call = Call(call_id or uuid.uuid4().hex, name)
        progress = _Progress(self, progress_handler, self._clock)
        with self.restores.harmless("reading a tool call"):
            self.restores.started(self.session, call)
        try:
            return await self.client.call_tool(
                name, dict(arguments or {}), progress_handler=progress, **kwargs
            )
        finally:
            with self.restores.harmless("reading a tool's end"):
                self.restores.ended(self.session, call.id)

    def closed(self) -> None:
        """The conversation has ended."""
        with self.restores.harmless("ending a session"):
            self.restores.closed(self.session)


class _Progress:
    """Turns a tool's progress into when it will end, and says so each time that half of it has passed."""

    def __init__(
        self, tools: ToolgapTools, inner: ProgressHandler | None, clock: Callable[[], float]
    ) -> None:
        self._tools, self._inner, self._clock = tools, inner, clock
        self._begin_s = clock()
        self._said_s: float | None = None

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        with self._tools.restores.harmless("reading a tool's progress"):
            remains_s = left_s(self._clock() - self._begin_s, progress, total)
            if remains_s and (self._said_s is None or remains_s <= self._said_s / 2):
                self._said_s = remains_s
                self._tools.restores.expected(self._tools.session, remains_s)
        if self._inner is not None:
            await self._inner(progress, total, message)
