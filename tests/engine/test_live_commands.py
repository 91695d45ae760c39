"""The commands against a real server: prefixes by messages and request, what is told afterwards, the live view."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import ADMIN_KEY, DEADLINE_S, PAGE, Prompt, Server, until
from openai.types.chat import ChatCompletion
from typer.testing import CliRunner, Result

from toolgap.cli import app
from toolgap.protocol import OperationStatus, Overview, Resolved, State
from toolgap.terminal import Exit

pytestmark = pytest.mark.engine

TEMPLATE = Path(__file__).parent.parent / "templates" / "qwen3.jinja"
QUESTION: dict[str, Any] = {"role": "user", "content": "Which files are here, and how large are they? " * 40}


@pytest.fixture(scope="module")
def chat_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--chat-template", str(TEMPLATE)]
    with Server(model, tmp_path_factory.mktemp("commands"), arguments=arguments) as server:
        yield server


@pytest.fixture
def chat(chat_server: Server) -> Iterator[Server]:
    with chat_server.left_as_found():
        yield chat_server


def run(server: Server, *arguments: str, stdin: str | None = None) -> Result:
    environ = {"TOOLGAP_URL": server.url, "TOOLGAP_API_KEY": ADMIN_KEY, "COLUMNS": "200"}
    return CliRunner(env=environ).invoke(app, arguments, input=stdin)


def test_a_saved_request_and_its_id_are_restored_and_the_continuation_is_told(chat: Server) -> None:
    request = {"model": "m", "messages": [QUESTION], "max_tokens": 4, "temperature": 0}
    reply = chat.http.post("/v1/chat/completions", json=request).json()
    answer = reply["choices"][0]["message"]
    turn = {**request, "messages": [QUESTION, {"role": "assistant", "content": answer["content"]}]}

    result = run(chat, "resolve", "--messages", "-", "--json", stdin=json.dumps(turn))
    resolved = msgspec.json.decode(result.stdout, type=Resolved)
    assert resolved.stable_tokens is not None
    assert 256 < resolved.stable_tokens <= len(resolved.token_ids)

    chat.flush()
    result = run(chat, "submit", "--messages", "-", "--wait", "--id", "turn-7", stdin=json.dumps(request))
    assert result.exit_code == Exit.OK, result.output
    assert "restored" in result.stdout
    assert "tokens were a prompt, 0 are the answer" in result.stdout

    chat.generate(resolved.token_ids[: 20 * PAGE] + [5, 6, 7])
    shown = until("the continuation is told", lambda: _told(run(chat, "status", "turn-7")))
    assert f"differs from token {20 * PAGE} on" in shown
    assert "submitted" in shown
    assert "prompted" in shown

    chat.flush()
    result = run(chat, "submit", "--request-id", reply["id"], "--wait", "--json")
    outcome = msgspec.json.decode(result.stdout, type=OperationStatus)
    assert (result.exit_code, outcome.state) == (Exit.OK, State.RESTORED)


def _told(result: Result) -> str | None:
    return result.stdout if "differs from" in result.stdout else None


def test_what_is_not_there_is_a_sentence_and_a_status(chat: Server) -> None:
    for arguments, status in (
        (("submit", "--request-id", "never"), Exit.REFUSED),
        (("status", "never"), Exit.REFUSED),
        (("resolve", "--messages", "-"), Exit.REFUSED),
        (("status", "--api-key", "wrong"), Exit.REFUSED),
        (("wait", "never"), Exit.REFUSED),
    ):
        result = run(chat, *arguments, stdin='[{"role": "nobody", "content": "a"}]')
        assert result.exit_code == status, result.output
        assert "Traceback" not in result.output
        assert result.stderr.startswith("toolgap: ")


def test_submit_waits_for_a_miss_too(chat: Server, prompt: Prompt) -> None:
    result = run(chat, "submit", "--ids-file", "-", "--wait", stdin=json.dumps(prompt(40 * PAGE)))
    assert result.exit_code == Exit.FAILED
    assert "not_in_storage" in result.stdout


def test_watch_prints_a_line_of_json_a_look(chat: Server) -> None:
    result = run(chat, "watch", "--json", "--once")
    assert msgspec.json.decode(result.stdout, type=Overview).engine.storage_backend == "file"


@pytest.mark.parametrize("end", ["q", "interrupt"])
def test_watch_on_a_terminal_is_live_and_leaves_it_as_it_was(chat: Server, prompt: Prompt, end: str) -> None:
    prefix = prompt(40 * PAGE)
    chat.store(prefix + [5])
    person, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
    before = termios.tcgetattr(terminal)
    environment = {**os.environ, "TOOLGAP_URL": chat.url, "TOOLGAP_API_KEY": ADMIN_KEY, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "toolgap", "watch", "--interval", "0.2"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    try:
        screen = Screen(person)
        with chat.probe.hold("get") as wait_until_held:
            operation_id = chat.toolgap.submit(input_ids=prefix, operation_id=f"seen-{end}").operation_id
            wait_until_held()
            screen.until(operation_id)
            screen.until("restoring")
        screen.until("restored")
        assert chat.ended(operation_id).state is State.RESTORED
        if end == "q":
            os.write(person, b"q")
        else:
            process.send_signal(signal.SIGINT)
        screen.drain(process)
        assert process.wait(DEADLINE_S) == Exit.OK
        assert termios.tcgetattr(terminal) == before
        assert "Traceback" not in screen.seen
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(person)


class Screen:
    """What a command writes to its terminal."""

    def __init__(self, person: int) -> None:
        self._person = person
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until it was written since the last time."""
        start = len(self.seen)
        while text not in self.seen[start:]:
            ready, _, _ = select.select([self._person], [], [], DEADLINE_S)
            assert ready, f"no {text!r} in {self.seen[-2000:]!r}"
            self.seen += os.read(self._person, 65536).decode(errors="replace")

    def drain(self, process: "subprocess.Popen[bytes]") -> None:
        """Read until the command has ended, so that it never waits for room."""
        while process.poll() is None:
            ready, _, _ = select.select([self._person], [], [], 0.1)
            if ready:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self._person, 65536).decode(errors="replace")


# ---- the examples of docs/client.md, as they are written ----

EXAMPLES = re.findall(
    r"^```python\n(.*?)^```",
    (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
ANSWER = {
    "role": "assistant",
    "content": "I will look.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "list_files", "arguments": '{"path": "/"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3 files"}
TOOLS = [{"type": "function", "function": {"name": "list_files", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def open_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--chat-template", str(TEMPLATE)]
    with Server(model, tmp_path_factory.mktemp("open"), arguments=arguments, admin_key=None) as server:
        yield server


def test_the_script_of_the_document_restores_what_a_request_left(open_server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    open_server.store(prefix, rid="chatcmpl-1")
    ran = []
    names = {"completion_id": "chatcmpl-1", "run_the_tool": lambda: ran.append(True)}
    exec(EXAMPLES[0].replace("http://127.0.0.1:30000", open_server.url), names)
    assert ran
    [operation] = open_server.toolgap.overview().active or open_server.toolgap.overview().recent
    assert open_server.ended(operation.operation_id).state is State.RESTORED
    assert open_server.generate(prefix + [5]).host_tokens == 40 * PAGE


class ScriptedModel:
    """Answers with a tool call, as a tiny model would not, and then with what the server says."""

    def __init__(self, server: Server) -> None:
        self.chat = self.completions = self
        self._server = server
        self._asked = 0

    async def create(self, *, model: str, messages: list[Any], tools: list[Any]) -> Any:
        self._asked += 1
        plain = [
            message if isinstance(message, dict) else message.model_dump(exclude_unset=True)
            for message in messages
        ]
        body = {"model": model, "messages": plain, "tools": tools, "max_tokens": 4, "temperature": 0}
        reply = self._server.http.post("/v1/chat/completions", json=body).json()
        if self._asked == 1:
            # The tool takes long, and other traffic the turn's KV out of memory.
            self._server.flush()
            reply = {**reply, "choices": [{**reply["choices"][0], "message": ANSWER}]}
        return ChatCompletion.model_validate(reply)


def test_the_agent_of_the_document_restores_while_its_tool_runs(open_server: Server) -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLES[1].replace("http://127.0.0.1:30000", open_server.url), names)
    model = ScriptedModel(open_server)
    submitted = _newest(open_server)
    outcomes: list[OperationStatus] = []

    async def run_tool(call: Any) -> dict[str, Any]:
        assert call.function.name == "list_files"
        operation = await asyncio.to_thread(until, "it was submitted", submitted)
        outcomes.append(await asyncio.to_thread(open_server.ended, operation.operation_id))
        return RESULT

    async def play() -> Any:
        try:
            return await names["turn"](model, [QUESTION], TOOLS, run_tool)
        finally:
            await names["toolgap"].close()

    asyncio.run(play())
    [outcome] = outcomes
    assert outcome.stable_tokens is not None
    assert outcome.read_tokens > 256
    assert outcome.resident_tokens == 0
    told = open_server.toolgap.status(outcome.operation_id)
    assert told.first_divergent_token is None
    assert told.matched_tokens == told.requested_tokens


def _newest(server: Server) -> Callable[[], OperationStatus | None]:
    known = {operation.operation_id for operation in server.toolgap.overview().recent}

    def find() -> OperationStatus | None:
        view = server.toolgap.overview()
        new = [one for one in (*view.active, *view.recent) if one.operation_id not in known]
        return new[0] if new else None

    return find
