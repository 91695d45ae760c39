"""Ways to name a prefix on the command line, and files that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import Server, reply, run, serving, words

from toolgap.protocol import Resolved
from toolgap.terminal import Exit


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return serving(monkeypatch)


MESSAGES = [{"role": "user", "content": "größer"}]
CHAT = {
    "model": "m",
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_salt": "s",
    "temperature": 0.7,
    "stream": True,
    "max_tokens": None,
}
ANTHROPIC = {
    "model": "m",
    "messages": MESSAGES,
    "system": "be brief",
    "max_tokens": 100,
    "tools": [{"name": "f", "input_schema": {}}],
}


def sent(server: Server, content: Any, *options: str) -> dict[str, Any]:
    result = run("submit", "--messages", "-", *options, stdin=json.dumps(content))
    assert result.exit_code == Exit.OK, result.stderr
    body = server.bodies.pop()
    assert body.pop("action") == "submit"
    return body


def test_a_list_of_messages(server: Server) -> None:
    assert sent(server, MESSAGES) == {"messages": MESSAGES}
    assert sent(server, MESSAGES, "--api", "anthropic") == {"messages": MESSAGES, "api": "anthropic"}


def test_of_a_requests_body_what_shapes_the_prompt_and_its_namespace(server: Server) -> None:
    shaping = {
        name: CHAT[name] for name in ("model", "messages", "tools", "chat_template_kwargs", "cache_salt")
    }
    assert sent(server, CHAT) == shaping
    assert sent(server, CHAT, "--cache-salt", "mine") == {**shaping, "cache_salt": "mine"}
    shaping = {name: ANTHROPIC[name] for name in ("model", "messages", "system", "tools")}
    assert sent(server, ANTHROPIC, "--api", "anthropic") == {**shaping, "api": "anthropic"}


@pytest.mark.parametrize("field", ["system", "tools"])
def test_a_request_of_the_other_api_is_not_rendered_as_what_it_is_not(server: Server, field: str) -> None:
    body = {"messages": MESSAGES, field: ANTHROPIC[field]}
    result = run("submit", "--messages", "-", stdin=json.dumps(body))
    assert result.exit_code == Exit.USAGE
    assert "--api anthropic" in words(result.stderr)
    assert not server.bodies


def test_a_request_by_its_id(server: Server) -> None:
    assert run("submit", "--request-id", "chatcmpl-1", "--force").exit_code == Exit.OK
    assert server.bodies == [{"action": "submit", "request_id": "chatcmpl-1", "force": True}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"[1, 2", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"3", "neither a list of messages"),
        (b'["hello"]', "neither a list of messages"),
        (b"{}", "neither a list of messages"),
        (b'{"messages": "hello"}', "neither a list of messages"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "resolve"])
def test_files_that_hold_no_messages(
    server: Server, tmp_path: Path, command: str, content: bytes, says: str
) -> None:
    path = tmp_path / "turn.json"
    path.write_bytes(content)
    result = run(command, "--messages", str(path), environ={"COLUMNS": "500"})
    assert result.exit_code == Exit.USAGE
    assert says in words(result.stderr)
    assert "turn.json" in result.stderr
    assert "Traceback" not in result.output
    assert not server.bodies


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--messages", "/no/such/file"), "cannot read /no/such/file"),
        (("--messages", "/"), "cannot read /"),
        (("--messages", "a\0b"), "no name of a file"),
        (("--messages", "-", "--request-id", "a"), "exactly one"),
        (("--text", "a", "--api", "openai"), "--api"),
        (("--text", "a", "--api", "cohere"), "--api"),
        (("--text", "a", "--dp-rank", "-1"), "--dp-rank"),
    ],
)
def test_options_that_name_no_prefix(server: Server, arguments: tuple[str, ...], says: str) -> None:
    result = run("resolve", *arguments, stdin="[]")
    assert result.exit_code == Exit.USAGE
    assert says in words(result.stderr)
    assert not server.bodies


def test_resolve_shows_the_tokens(server: Server) -> None:
    resolved = Resolved(token_ids=list(range(100)), stable_tokens=90, expected_tokens=10)
    server.reply = lambda _: reply(resolved)
    result = run("resolve", "--text", "a")
    assert server.bodies == [{"action": "resolve", "text": "a"}]
    assert "100" in result.stdout
    assert "90 tokens were a prompt, 10 are the answer" in words(result.stdout)
    assert "0 1 2 3 4 5 6 7 ... 92 93" in words(result.stdout)
    assert json.loads(run("resolve", "--text", "a", "--json").stdout)["token_ids"] == list(range(100))
    server.reply = lambda _: reply(Resolved(token_ids=[5, 6]))
    plain = words(run("resolve", "--text", "a").stdout)
    assert plain == "tokens 2 token ids 5 6"
