"""Chat completions as an agent asks for them: streamed, greedy, timed at the client."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import httpx
import msgspec

from toolgap.client import connection
from toolgap.engineclient import EngineError, events, lines_of

PATH = "/v1/chat/completions"

Message = dict[str, Any]


class Call(NamedTuple):
    """A tool call of an answer."""

    call_id: str
    tool: str
    arguments: str
    """JSON, as the answer wrote it."""


class Answer(NamedTuple):
    """A streamed chat completion; the counts of tiers are of cached tokens."""

    ttft_s: float
    """From sending the request to receiving its first event, which SGLang sends with the first token."""
    total_s: float
    text: str
    calls: tuple[Call, ...]
    prompt_tokens: int
    output_ids: list[int]
    device_tokens: int
    host_tokens: int
    storage_tokens: int

    def message(self) -> Message:
        """The answer as the next request shows it."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.tool, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


class Chat:
    """A server, or a gateway before it, by OpenAI's API; use as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._http = httpx.Client(**connection(url, api_key), timeout=httpx.Timeout(600.0, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        session: str,
        max_tokens: int,
        call: str | None = None,
    ) -> Answer:
        """One request.

        Args:
            messages: The messages.
            tools: Definitions of tools.
            session: What the client calls its conversation.
            max_tokens: Longest answer; one that need not call a tool goes on to it whether or not the model ends it.
            call: The tool that the answer must call.

        Raises:
            EngineError: the server refuses, or does not answer as SGLang does.
        """
        body = {
            "model": "default",
            "messages": messages,
            "tools": tools,
            "tool_choice": "auto" if call is None else {"type": "function", "function": {"name": call}},
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": call is None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_cached_tokens_details": True,
            "return_output_ids_in_sglext": True,
            "prompt_cache_key": session,
        }
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        sent_s = time.perf_counter()
        with self._http.stream("POST", PATH, content=content, headers=headers) as reply:
            if reply.status_code != 200:
                reply.read()
                raise EngineError(f"the server answered {reply.status_code} to {PATH}: {reply.text[:500]}")
            return read(lines_of(reply.iter_bytes()), sent_s, time.perf_counter)


def read(lines: Iterable[str], sent_s: float, clock: Callable[[], float]) -> Answer:
    """Read a streamed chat completion.

    Args:
        lines: The lines of the reply, as they arrive.
        sent_s: When the request was sent, by `clock`.
        clock: Read at the first event, and when the stream ends.

    Raises:
        EngineError: the stream reports an error, holds no answer, or lacks SGLang's extensions.
    """
    ttft_s: float | None = None
    text = ""
    calls: dict[int, Call] = {}
    usage: dict[str, Any] = {}
    extension: dict[str, Any] = {}
    for event in events(lines):
        if "error" in event:
            raise EngineError(f"the server failed to answer: {event['error']}")
        usage = event.get("usage") or usage
        extension = event.get("sglext") or extension
        for choice in event["choices"]:
            ttft_s = clock() - sent_s if ttft_s is None else ttft_s
            delta = choice["delta"]
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                before = calls.get(part["index"], Call("", "", ""))
                function = part.get("function") or {}
                calls[part["index"]] = Call(
                    part.get("id") or before.call_id,
                    function.get("name") or before.tool,
                    before.arguments + (function.get("arguments") or ""),
                )
    total_s = clock() - sent_s
    if ttft_s is None:
        raise EngineError("the server ended an answer before its first token")
    if not usage or not extension:
        raise EngineError(
            "the server says nothing of tokens and tiers behind its answer: it is not SGLang 0.5.23"
        )
    tiers = extension.get("cached_tokens_details") or {}
    return Answer(
        ttft_s=ttft_s,
        total_s=total_s,
        text=text,
        calls=tuple(calls.values()),
        prompt_tokens=usage["prompt_tokens"],
        output_ids=(extension.get("output_ids") or [[]])[0],
        device_tokens=tiers.get("device", 0),
        host_tokens=tiers.get("host", 0),
        storage_tokens=tiers.get("storage", 0),
    )
