"""A real gateway process for the tests, and an agent whose tools run while it restores."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from harness import ADMIN_KEY, DEADLINE_S, Server, until
from prometheus_client.parser import text_string_to_metric_families

from toolgap.childserver import ChildServer, free_port

START_DEADLINE_S = 240.0

NAME = "count_lines"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["/etc/passwd"]}},
    "required": ["path"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": NAME, "description": "Counts lines.", "parameters": PARAMETERS}}
]
ANTHROPIC_TOOLS: list[Any] = [{"name": NAME, "description": "Counts lines.", "input_schema": PARAMETERS}]

WORKER_ARGUMENTS = ("--tool-call-parser", "pythonic", "--constrained-json-disable-any-whitespace")
"""With this parser ``tool_choice`` makes any model write its calls by a grammar, even one of random weights."""


CLIENTS: list[openai.OpenAI | anthropic.Anthropic] = []
"""Those of all agents so far; a gateway's end closes them."""


class Gateway:
    """A gateway process."""

    def __init__(self, child: ChildServer, url: str, log: Path) -> None:
        self.child, self.url, self.log = child, url, log
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = self.http.get("/metrics").text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"toolgap_gateway_{name}" and labels.items() <= sample.labels.items()
        )

    def until_metric(self, name: str, least: float, **labels: str) -> None:
        """Wait until a metric is at least so much."""
        until(f"{name} {labels} is {least}", lambda: self.metric(name, **labels) >= least)

    def hint(self, **hint: Any) -> httpx.Response:
        """Tell the gateway about a tool."""
        return self.http.post("/toolgap/hints", json=hint)

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client, with the gateway as its base URL."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=ADMIN_KEY, max_retries=0, **options)

    def anthropic(self) -> anthropic.Anthropic:
        """Anthropic's client, with the gateway as its base URL."""
        return anthropic.Anthropic(base_url=self.url, auth_token=ADMIN_KEY, max_retries=0)


@contextmanager
def gateway(folder: Path, upstreams: Sequence[str], *options: str) -> Iterator[Gateway]:
    """Start a gateway in front of these servers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "toolgap", "gateway", "--port", str(port), "--check-interval-s", "2"]
    command += [part for upstream in upstreams for part in ("--upstream", upstream)]
    log = folder / "gateway.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOOLGAP_")}
    child = ChildServer([*command, *options], f"{url}/readyz", log, environment, grace_s=5.0)
    with child:
        child.wait_until_healthy(START_DEADLINE_S)
        running = Gateway(child, url, log)
        try:
            yield running
        finally:
            running.http.close()
            while CLIENTS:
                CLIENTS.pop().close()


def count_lines(path: str) -> str:
    """A real tool."""
    return subprocess.run(["wc", "-l", path], capture_output=True, text=True, check=True).stdout.strip()


def system(text: str) -> str:
    """A system prompt of some hundred tokens that begins as no other does."""
    return f"{text}: you look after the files of one machine, and count what they hold. " * 8


class OpenAIAgent:
    """One conversation, by OpenAI's client.

    Args:
        url: Its base URL.
        name: Makes the conversation's prompt unlike others.
        streamed: Whether answers are streamed.
        headers: Of every request.
    """

    def __init__(
        self, url: str, name: str, *, streamed: bool = False, headers: dict[str, str] | None = None
    ) -> None:
        self.client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=ADMIN_KEY,
            max_retries=0,
            default_headers=headers or {},
        )
        CLIENTS.append(self.client)
        self.streamed = streamed
        self.messages: list[Any] = [
            {"role": "system", "content": system(name)},
            {"role": "user", "content": "How many lines has /etc/passwd?"},
        ]
        self.cached: Any = None
        self.text = ""

    def ask(self, choice: str, max_tokens: int = 48) -> list[tuple[str, str]]:
        """One request; its tool calls as (id, arguments)."""
        request: dict[str, Any] = {
            "model": "default",
            "messages": self.messages,
            "tools": TOOLS,
            "parallel_tool_calls": False,
            "tool_choice": {"type": "function", "function": {"name": NAME}} if choice == "call" else choice,
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if self.streamed:
            return self._read(self.client.chat.completions.create(stream=True, **request))
        message = self.client.chat.completions.create(**request).choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        self.text = message.content or ""
        return [(call.id, call.function.arguments) for call in message.tool_calls or ()]

    def _read(self, stream: Any) -> list[tuple[str, str]]:
        calls: dict[int, dict[str, Any]] = {}
        text = ""
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                    call["id"] = part.id or call["id"]
                    call["name"] = part.function.name or call["name"]
                    call["arguments"] += part.function.arguments or ""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls.values()
            ]
        self.messages.append(message)
        self.text = text
        return [(call["id"], call["arguments"]) for call in calls.values()]

    def turn(self, meanwhile: Callable[[list[str]], None]) -> None:
        """An answer that calls a tool, the tool, and what happens before its result is sent."""
        calls = self.ask("call")
        assert calls, self.messages[-1]
        for call_id, arguments in calls:
            result = count_lines(json.loads(arguments)["path"])
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        meanwhile([call_id for call_id, _ in calls])


class AnthropicAgent:
    """One conversation, by Anthropic's client; arguments and methods as of :class:`OpenAIAgent`."""

    def __init__(
        self, url: str, name: str, *, streamed: bool = False, headers: dict[str, str] | None = None
    ) -> None:
        self.client = anthropic.Anthropic(
            base_url=url, auth_token=ADMIN_KEY, max_retries=0, default_headers=headers or {}
        )
        CLIENTS.append(self.client)
        self.streamed = streamed
        self.system = system(name)
        self.messages: list[Any] = [{"role": "user", "content": "How many lines has /etc/passwd?"}]
        self.text = ""

    def ask(self, choice: str, max_tokens: int = 48) -> list[tuple[str, str]]:
        """One request; its tool calls as (id, arguments)."""
        request: dict[str, Any] = {
            "model": "default",
            "system": self.system,
            "messages": self.messages,
            "tools": ANTHROPIC_TOOLS,
            "tool_choice": {"type": "tool", "name": NAME, "disable_parallel_tool_use": True}
            if choice == "call"
            else {"type": choice},
            "max_tokens": max_tokens,
            # This client has no argument for it.
            "extra_body": {"temperature": 0},
        }
        if self.streamed:
            with self.client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = self.client.messages.create(**request)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        self.messages.append({"role": "assistant", "content": content})
        self.text = "".join(block["text"] for block in content if block["type"] == "text")
        return [(block["id"], json.dumps(block["input"])) for block in content if block["type"] == "tool_use"]

    def turn(self, meanwhile: Callable[[list[str]], None]) -> None:
        """As of :class:`OpenAIAgent`."""
        calls = self.ask("call")
        assert calls, self.messages[-1]
        blocks = [
            {
                "type": "tool_result",
                "tool_use_id": call_id,
                "content": count_lines(json.loads(arguments)["path"]),
            }
            for call_id, arguments in calls
        ]
        self.messages.append({"role": "user", "content": blocks})
        meanwhile([call_id for call_id, _ in calls])


Agent = OpenAIAgent | AnthropicAgent


def backed_up(server: Server) -> None:
    """Drop L1 and L2 as soon as everything is in L3, as if other work had evicted it."""
    server.flush()
