"""Answers of ``/v1/responses``. No I/O.

Only the tool calls, the ids and the sizes are read. SGLang makes its prompts of items by its own route, which
a prefix's ``messages`` do not go through: the prefix is named by the response's id, which is the request's as well.
"""

from toolgap.gateway.apis.answers import (
    Content,
    Json,
    Reader,
    UnreadableError,
    Usage,
    dicts,
    given,
    optional,
    usage_of,
)
from toolgap.hooks.restores import Call

CALLS = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "computer_call",
)
"""Items whose tool the client runs."""


class ResponsesReader(Reader):
    """Reads a response.

    Args:
        max_bytes: What may be kept of it.
        request: Not needed.
    """

    def __init__(self, max_bytes: int, request: Json) -> None:
        super().__init__(max_bytes)
        self._id: str | None = None
        self._calls: dict[int, Call] = {}
        self._reasoned = False
        self._finish: str | None = None
        self._usage = Usage()

    def event(self, event: Json) -> None:
        """One event; those of unknown types say nothing."""
        match event.get("type"):
            case "error" | "response.failed":
                raise UnreadableError("the server answered with an error")
            case "response.output_item.added":
                self._added(given(event.get("item"), dict))
            case "response.output_item.done":
                self._done(given(event.get("output_index"), int), given(event.get("item"), dict))
            case "response.completed" | "response.incomplete":
                self._end(given(event.get("response"), dict))

    def body(self, body: Json) -> None:
        """A whole response."""
        if body.get("error") is not None:
            raise UnreadableError("the server answered with an error")
        self._end(body)

    def content(self) -> Content:
        """Its tool calls, in order."""
        certain = self._finish == "completed"
        calls = tuple(self._calls[index] for index in sorted(self._calls)) if certain else ()
        return Content(self._id, calls, (), self._finish, self._reasoned, self._usage)

    def _added(self, item: Json) -> None:
        self.calling |= item.get("type") in CALLS

    def _done(self, index: int, item: Json) -> None:
        self._added(item)
        self._reasoned |= item.get("type") == "reasoning"
        if item.get("type") in CALLS:
            call = Call(
                given(item.get("call_id"), str),
                optional(item.get("name"), str) or given(item.get("type"), str),
            )
            self.keep(512 + 4 * (len(call.id) + len(call.tool)))
            self._calls[index] = call

    def _end(self, response: Json) -> None:
        status = given(response.get("status"), str)
        if status not in ("completed", "incomplete"):
            # In the background, or failed.
            raise UnreadableError("the response is not complete")
        for index, item in enumerate(dicts(response.get("output"))):
            self._done(index, item)
        name = given(response.get("id"), str)
        self.keep(len(name))
        self._id, self._finish = name, status
        self._usage = usage_of(response.get("usage"), "input_tokens", "output_tokens")
        self.whole = self.over = True
