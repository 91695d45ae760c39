"""SGLang's own HTTP interface, as far as demo and benchmark need it, timed at the client."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from toolgap.client import connection

FLUSH_DEADLINE_S = 120.0


class EngineError(RuntimeError):
    """The server does not do what is asked of it; the text says what, and what it answered."""


class Generation(NamedTuple):
    """What a streamed ``/generate`` returned, timed at the client; token counts are of cached tokens."""

    ttft_s: float
    """From sending the request to receiving its first token."""
    total_s: float
    prompt_tokens: int
    output_ids: list[int]
    text: str
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    chunks: list[tuple[float, int]] = []
    """Each event that brought tokens: seconds since the request was sent, and tokens so far."""
    times: dict[str, float] = {}
    """What the engine says of the request's life, by its own names: Unix times and durations, in seconds.
    Empty unless the server runs with ``--enable-metrics``."""


ENGINE_TIMES = (
    "request_received_ts",
    "api_server_dispatch_finish_ts",
    "queue_time",
    "storage_prefetch_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "first_token_latency",
    "request_finished_ts",
)
"""What of ``meta_info`` goes into :attr:`Generation.times`."""


class Engine:
    """A server that speaks SGLang's HTTP interface; use as a context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url, self.api_key = url, api_key
        self._http = httpx.Client(
            **connection(url, api_key),
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def tokenize_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, answer: bool
    ) -> list[int]:
        """Token ids of messages, rendered by the model's chat template in the server as for a chat completion.

        Args:
            messages: The messages.
            tools: Definitions of tools, for templates that know them.
            answer: Whether the tokens that open the model's answer follow.
        """
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": answer}
        if tools is not None:
            body["tools"] = tools
        return self._tokens(body)

    def tokenize_text(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._tokens({"prompt": text})

    def context_tokens(self) -> int:
        """The longest prompt and answer that the model takes."""
        reply = self._checked(self._http.get("/v1/models")).json()
        return int(reply["data"][0]["max_model_len"])

    def model_name(self) -> str:
        """The model's path or hub name."""
        return str(self._checked(self._http.get("/model_info")).json()["model_path"])

    def release(self) -> str:
        """The server's SGLang release."""
        return str(self._checked(self._http.get("/server_info")).json().get("version", "unknown"))

    def l1_tokens(self) -> int:
        """What the device's KV cache holds."""
        return int(self._checked(self._http.get("/server_info")).json()["max_total_num_tokens"])

    def set_prefetch_policy(self, backend: str, policy: str) -> None:
        """Change how long a request waits for its own storage read; SGLang wants an admin key for it."""
        body = {"hicache_storage_backend": backend, "hicache_storage_prefetch_policy": policy}
        self._checked(self._http.put("/hicache/storage-backend", json=body))

    def counters(self) -> dict[str, float]:
        """Prometheus samples by name, summed over their labels; empty without ``--enable-metrics``."""
        reply = self._http.get("/metrics", follow_redirects=True)
        return {} if reply.status_code == 404 else read_samples(self._checked(reply).text)

    def flush(self) -> None:
        """Drop L1 and L2; L3 stays. SGLang refuses while anything is in flight, so this repeats."""
        end = time.monotonic() + FLUSH_DEADLINE_S
        while (reply := self._http.post("/flush_cache")).status_code != 200:
            if reply.status_code != 400 or time.monotonic() > end:
                raise EngineError(f"the server would not flush its cache: {reply.status_code} {reply.text}")
            time.sleep(0.05)

    def generate(
        self, input_ids: Sequence[int], *, max_new_tokens: int, cache_salt: str | None = None
    ) -> Generation:
        """Greedy generation, streamed and timed."""
        body = {
            "input_ids": input_ids,
            "cache_salt": cache_salt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        }
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        sent_s = time.perf_counter()
        with self._http.stream("POST", "/generate", content=content, headers=headers) as reply:
            if reply.status_code != 200:
                reply.read()
                self._checked(reply)
            return read_stream(lines_of(reply.iter_bytes()), sent_s, time.perf_counter)

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        reply = self._checked(self._http.post("/v1/tokenize", json=body)).json()
        return [int(token) for token in reply["tokens"]]

    def _checked(self, reply: httpx.Response) -> httpx.Response:
        if reply.status_code != 200:
            raise EngineError(
                f"the server answered {reply.status_code} to {reply.request.method} {reply.request.url.path}: "
                f"{reply.text[:500]}"
            )
        return reply


def read_stream(lines: Iterable[str], sent_s: float, clock: Callable[[], float]) -> Generation:
    """Read a streamed ``/generate``.

    Args:
        lines: The lines of the reply, as they arrive.
        sent_s: When the request was sent, by `clock`.
        clock: Read once for each event that brings tokens, and when the stream ends.

    Raises:
        EngineError: the stream reports an error, or holds no token.
    """
    chunks: list[tuple[float, int]] = []
    output_ids: list[int] = []
    text = ""
    meta: dict[str, Any] = {}
    for event in events(lines):
        if "error" in event:
            raise EngineError(f"the server failed to generate: {event['error']}")
        meta = event["meta_info"]
        new_ids = event.get("output_ids") or []
        tokens = meta.get("completion_tokens") or 0
        if tokens > (chunks[-1][1] if chunks else 0):
            chunks.append((clock() - sent_s, tokens))
        # A server may stream all ids so far in every event (the default) or only the new ones.
        cumulative = len(new_ids) == tokens
        output_ids = new_ids if cumulative else output_ids + new_ids
        text = event.get("text", "") if cumulative else text + event.get("text", "")
    total_s = clock() - sent_s
    if not chunks:
        raise EngineError("the server ended a generation before its first token")
    details = meta.get("cached_tokens_details") or {}
    return Generation(
        ttft_s=chunks[0][0],
        total_s=total_s,
        prompt_tokens=meta["prompt_tokens"],
        output_ids=output_ids,
        text=text,
        device_tokens=details.get("device", 0),
        host_tokens=details.get("host", 0),
        storage_tokens=details.get("storage", 0),
        chunks=chunks,
        times={name: float(meta[name]) for name in ENGINE_TIMES if meta.get(name) is not None},
    )


def read_samples(text: str) -> dict[str, float]:
    """Samples of a Prometheus exposition by name, summed over their labels."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            # A label's value may hold blanks and braces; name and value cannot.
            name = line.partition("{")[0].partition(" ")[0]
            value = line.rpartition("}")[2].split() if "{" in line else line.split()[1:]
            samples[name] = samples.get(name, 0.0) + float(value[0])
    return samples


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a server-sent stream, each when it is whole.

    httpx's ``iter_lines`` ends them also at what Unicode calls a line's end, such as U+2028, and JSON may hold that.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event: dict[str, Any] = msgspec.json.decode(data)
        yield event
