"""The command line: options, what is printed, exit statuses. Servers are in tests/engine."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from command import RESTORED, Server, operation, reply, run, serving, words
from rich.console import Console
from typer.testing import Result

from samples import ENGINE
from toolgap import calls, client, serve, terminal
from toolgap.cli import doctor
from toolgap.demo import main as demo
from toolgap.doctor.answers import ServerAnswers
from toolgap.doctor.findings import Finding, has_problem
from toolgap.doctor.installation import Installation
from toolgap.protocol import (
    Code,
    Error,
    ErrorReply,
    OperationStatus,
    Overview,
    Reason,
    State,
    Target,
)
from toolgap.settings import Settings, variable
from toolgap.terminal import EXITS, Exit

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return serving(monkeypatch)


# ---- exit statuses and variables ----


def test_a_closed_stdin_is_told() -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -m toolgap submit --text-file - <&-'],
        capture_output=True,
        text=True,
    )
    assert done.returncode == Exit.USAGE
    assert "stdin is closed" in words(done.stderr)


def test_help_says_every_exit_status() -> None:
    result = run("--help")
    assert result.exit_code == Exit.OK
    assert EXITS.keys() == set(Exit)
    for status, text in EXITS.items():
        assert f"{status.value} {text}" in words(result.stdout)


def test_variables_of_the_command_are_none_of_the_settings() -> None:
    settings = {variable(field.name) for field in fields(Settings)}
    own = {terminal.URL_VARIABLE, terminal.API_KEY_VARIABLE, terminal.DEBUG_VARIABLE}
    assert settings.isdisjoint({*own, "TOOLGAP_CPU"})


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "toolgap", "version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "toolgap")


@pytest.mark.parametrize(
    "arguments", [("dance",), ("submit", "--dance"), ("wait",), ("doctor", "--port", "1")]
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == Exit.USAGE


# ---- operations ----


def test_a_status_shows_where_kv_went_and_what_holds_it(server: Server) -> None:
    shown = msgspec.structs.replace(
        RESTORED, target=Target.DEVICE, promoted_tokens=992, lease_s=30.0, leased_tokens=992, dp_rank=1
    )
    server.reply = lambda _: reply(shown)
    lines = dict(line.split("  ", 1) for line in run("status", "op-1").stdout.splitlines() if "  " in line)
    rows = {name: value.strip() for name, value in lines.items()}
    assert rows["promoted"] == "992 tokens"
    assert rows["leased"] == "992 tokens, for 30 s"
    assert rows["replica"] == "1"
    server.reply = lambda _: reply(RESTORED)
    plain = run("status", "op-1").stdout
    assert not any(name in plain for name in ("promoted", "leased", "replica"))


def test_an_overview_shows_calls_that_hang(server: Server) -> None:
    stalled = msgspec.structs.replace(ENGINE, stalled_reads=2, quarantined_tokens=640)
    server.reply = lambda _: reply(Overview(active=[], recent=[], engine=stalled))
    assert "2 storage calls, with 640 tokens" in run("status").stdout


def test_submit_sends_what_was_asked(server: Server) -> None:
    options = ["--id", "op-1", "--extra-key", "k", "--cache-salt", "s", "--ttl", "5", "--namespace", "n"]
    options += ["--lora", "a", "--dp-rank", "1", "--gap", "2", "--target", "device", "--lease", "9"]
    result = run("submit", "--text", "hello", *options)
    assert result.exit_code == Exit.OK
    assert server.bodies == [
        {
            "action": "submit",
            "text": "hello",
            "operation_id": "op-1",
            "extra_key": "k",
            "cache_salt": "s",
            "lora_path": "a",
            "routed_dp_rank": 1,
            "ttl_s": 5.0,
            "expected_gap_s": 2.0,
            "target": "device",
            "lease_s": 9.0,
            "namespace": "n",
        }
    ]
    assert "op-1" in result.stdout
    assert "1000 tokens, 992 in whole pages" in result.stdout


def test_submit_tries_again_for_as_long_as_it_may(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    time = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(calls, "time", time)
    monkeypatch.setattr(client, "time", time)
    error = ErrorReply(error=Error(code=Code.PAUSED, message="paused", retry_after_s=2.0))
    server.reply = lambda _: reply(error, 503) if len(pauses) < 2 else reply(operation())
    assert run("submit", "--text", "a", "--retry", "60").exit_code == Exit.OK
    assert len(pauses) == 2
    server.reply = lambda _: reply(error, 503)
    assert run("submit", "--text", "a").exit_code == Exit.REFUSED
    assert len(pauses) == 2
    assert run("submit", "--text", "a", "--retry", "-1").exit_code == Exit.USAGE


def test_submit_reads_files_and_stdin(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("größer")
    (tmp_path / "ids").write_text("[1, 2]")
    assert run("submit", "--text-file", str(tmp_path / "text")).exit_code == Exit.OK
    assert run("submit", "--ids-file", str(tmp_path / "ids")).exit_code == Exit.OK
    assert run("submit", "--text-file", "-", stdin="from stdin").exit_code == Exit.OK
    assert [body.get("text") or body["input_ids"] for body in server.bodies] == [
        "größer",
        [1, 2],
        "from stdin",
    ]


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ((), None, "exactly one"),
        (("--text", "a", "--text-file", "-"), "a", "exactly one"),
        (("--text-file", "/no/such/file"), None, "/no/such/file"),
        (("--text-file", "-"), b"\xff", "UTF-8"),
        (("--ids-file", "-"), "1 2 3", "JSON list"),
        (("--ids-file", "-"), '["one"]', "JSON list"),
        (("--text", "a", "--ttl", "soon"), None, "--ttl"),
        (("--text", "a", "--ttl", "nan"), None, "finite number of seconds"),
        (("--text", "a", "--retry", "inf"), None, "finite number of seconds"),
        (("--text", "a", "--url", "server:1"), None, "no URL of a server"),
        (("--text", "a", "--api-key", "ключ"), None, "API key"),
        (("--text", "\udcff"), None, "not text"),
    ],
)
def test_submits_that_are_not_sent(
    server: Server, arguments: tuple[str, ...], stdin: str | bytes | None, says: str
) -> None:
    result = run("submit", *arguments, stdin=stdin)
    assert result.exit_code == Exit.USAGE
    assert says in words(result.stderr)
    assert not server.bodies


def test_the_server_and_its_key_come_from_the_environment(server: Server) -> None:
    environ = {"TOOLGAP_URL": "http://elsewhere:1", "TOOLGAP_API_KEY": "key"}
    assert run("cancel", "op-1", environ=environ).exit_code == Exit.OK
    assert server.bodies == [{"action": "cancel", "operation_id": "op-1"}]
    assert server.headers[0]["Host"] == "elsewhere:1"
    assert server.headers[0]["Authorization"] == "Bearer key"


def test_json_is_the_servers_reply(server: Server) -> None:
    result = run("status", "op-1", "--json")
    assert msgspec.json.decode(result.stdout, type=OperationStatus) == RESTORED


def test_status_without_an_id_shows_all(server: Server) -> None:
    overview = Overview(active=[operation()], recent=[RESTORED], engine=ENGINE)
    server.reply = lambda _: reply(overview)
    result = run("status")
    assert server.bodies == [{"action": "status"}]
    assert "1 active of 16, 1 recent" in words(result.stdout)
    assert "op-1 restored complete 1000 0 0 0.250" in words(result.stdout)
    assert msgspec.json.decode(run("status", "--json").stdout, type=Overview) == overview


def test_an_empty_overview(server: Server) -> None:
    server.reply = lambda _: reply(Overview(active=[], recent=[], engine=ENGINE))
    assert "0 active" in run("status").stdout


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (RESTORED, Exit.OK),
        (operation(State.PARTIAL, Reason.STORAGE_SHORTFALL), Exit.FAILED),
        (operation(State.MISS, Reason.NOT_IN_STORAGE), Exit.FAILED),
    ],
)
def test_wait_succeeds_only_if_all_was_restored(
    server: Server, outcome: OperationStatus, status: Exit
) -> None:
    server.reply = lambda _: reply(outcome)
    result = run("wait", "op-1")
    assert result.exit_code == status
    assert outcome.state in result.stdout


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_submit_may_wait_too(server: Server, as_json: tuple[str, ...]) -> None:
    outcome = operation(State.PARTIAL, Reason.STORAGE_SHORTFALL)
    server.reply = lambda body: reply(operation() if body["action"] == "submit" else outcome)
    result = run("submit", "--text", "a", "--wait", "--timeout", "5", *as_json)
    assert result.exit_code == Exit.FAILED
    assert [body["action"] for body in server.bodies] == ["submit", "status"]
    assert server.bodies[1]["wait_s"] <= 5.0
    assert "storage_shortfall" in result.stdout
    assert "restoring" not in result.stdout


def test_an_interrupt_has_its_own_status(server: Server) -> None:
    def interrupt(_: dict[str, Any]) -> httpx.Response:
        raise KeyboardInterrupt

    server.reply = interrupt
    result = run("wait", "op-1")
    assert result.exit_code == Exit.INTERRUPTED
    assert "Traceback" not in result.output


def test_a_wait_that_is_over_too_soon(server: Server) -> None:
    server.reply = lambda _: reply(operation())
    result = run("wait", "op-1", "--timeout", "0")
    assert result.exit_code == Exit.FAILED
    assert "still restoring" in result.stderr


def test_a_refusal_says_what_and_when_to_try_again(server: Server) -> None:
    error = Error(code=Code.TOO_MANY_OPERATIONS, message="16 operations are active", retry_after_s=0.5)
    server.reply = lambda _: reply(ErrorReply(error=error), 429)
    result = run("submit", "--text", "a")
    assert result.exit_code == Exit.REFUSED
    assert "429 too_many_operations" in words(result.stderr)
    assert "16 operations are active" in words(result.stderr)
    assert "0.5 s" in words(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (httpx.Response(401, json={"error": "Unauthorized"}), Exit.REFUSED),
        (httpx.Response(404, json={"detail": "Not Found"}), Exit.UNREACHABLE),
        (httpx.Response(502), Exit.UNREACHABLE),
    ],
)
def test_replies_that_are_not_toolgaps(server: Server, response: httpx.Response, status: Exit) -> None:
    server.reply = lambda _: response
    assert run("status").exit_code == status


def test_nobody_listens(unused_port: int) -> None:
    result = run("status", "--url", f"http://127.0.0.1:{unused_port}")
    assert result.exit_code == Exit.UNREACHABLE
    assert "no answer from" in words(result.stderr)


@pytest.fixture
def unused_port() -> int:
    """A port that refuses connections: it was ours a moment ago, and the system hands out others first."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_fault_of_ours_is_a_sentence_and_a_traceback_only_on_request(server: Server) -> None:
    def fail(_: dict[str, Any]) -> httpx.Response:
        raise RuntimeError("oh")

    server.reply = fail
    result = run("status")
    assert result.exit_code == Exit.FAULT
    assert "RuntimeError: oh" in words(result.stderr)
    assert "Traceback" not in result.output
    assert isinstance(run("status", environ={"TOOLGAP_DEBUG": "1"}).exception, RuntimeError)


# ---- serve ----


def test_serve_has_an_option_for_every_setting() -> None:
    listed = words(run("serve", "--help", environ={"COLUMNS": "200"}).stdout)
    for field in fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in listed
        assert variable(field.name) in listed


def test_serve_prints_what_it_would_run() -> None:
    result = run("serve", "--print", "--max-operations", "4", "--no-join", "--", "--model-path", "m", "-x")
    assert result.exit_code == Exit.OK
    assert "TOOLGAP_MAX_OPERATIONS=4" in result.stdout
    assert "TOOLGAP_JOIN=False" in result.stdout
    assert result.stdout.rstrip().endswith("-m sglang.launch_server --model-path m -x")


def test_serve_prints_the_cpu_model_without_making_it(tmp_path: Path) -> None:
    result = run("serve", "--print", "--cpu", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert result.exit_code == Exit.OK
    assert f"--model-path {tmp_path}" in result.stdout
    assert not list(tmp_path.iterdir())


def test_serve_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "require_sglang", lambda: None)
    launched = []
    monkeypatch.setattr("os.execvpe", lambda *arguments: launched.append(arguments))
    assert run("serve", "--max-outcomes", "3", "--model", "m").exit_code == Exit.OK
    [(file, command, environment)] = launched
    assert (file, command[1:]) == (sys.executable, ["-m", "sglang.launch_server", "--model-path", "m"])
    assert environment["TOOLGAP_MAX_OUTCOMES"] == "3"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-operations", "0"), "TOOLGAP_MAX_OPERATIONS"),
        (("--model", "a", "--", "--model", "b"), "twice"),
        (("--max-operations", "four"), "--max-operations"),
    ],
)
def test_serve_with_what_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(serve, "require_sglang", lambda: None)
    result = run("serve", *arguments)
    assert result.exit_code == Exit.USAGE
    assert says in words(result.stderr)


def test_serve_without_sglang_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = run("serve", "--", "--model-path", "m")
    assert result.exit_code == Exit.USAGE
    assert "pip install 'toolgap[sglang]'" in words(result.stderr)


def test_serve_prints_json() -> None:
    result = run("serve", "--print", "--json", "--max-operations", "4", "--", "--model-path", "m")
    launch = json.loads(result.stdout)
    assert launch["command"][-2:] == ["--model-path", "m"]
    assert launch["environment"]["TOOLGAP_MAX_OPERATIONS"] == "4"
    assert run("serve", "--json", "--", "--model-path", "m").exit_code == Exit.USAGE


# ---- doctor ----

SOUND = Installation("0.5.23", [], ["toolgap"])


def examine(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, installation: Installation = SOUND, **environ: str
) -> Result:
    monkeypatch.setattr(doctor, "inspect_installation", lambda: installation)
    return run("doctor", *arguments, environ={"SGLANG_PLUGINS": "", **environ})


def test_doctor_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examine(monkeypatch)
    assert result.exit_code == Exit.OK
    assert "No problems." in result.stdout


def test_doctor_finds_a_problem_and_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examine(monkeypatch, installation=SOUND._replace(sglang_version=None))
    assert result.exit_code == Exit.FAILED
    assert "Mend: pip install 'toolgap[sglang]'" in words(result.stdout)
    assert "1 problem" in result.stdout


def test_doctor_checks_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--prompt-tokens", "100", "--", "--enable-hierarchical-cache")
    result = examine(monkeypatch, *arguments)
    assert result.exit_code == Exit.FAILED
    assert "No storage backend" in words(result.stdout)
    assert "prefetch_threshold" in words(result.stdout)


def test_doctor_speaks_json(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examine(monkeypatch, "--json", "--", "--enable-hierarchical-cache")
    findings = msgspec.json.decode(result.stdout, type=list[Finding])
    assert has_problem(findings)
    assert result.exit_code == Exit.FAILED


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "http://server:1", "--", "--tp-size", "2"),
        ("--prompt-tokens", "100"),
        ("--prompt-tokens", "0", "--url", "http://server:1"),
        ("--url", "server"),
    ],
)
def test_doctor_with_options_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    assert examine(monkeypatch, *arguments).exit_code == Exit.USAGE


def test_doctor_asks_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(url: str, api_key: str | None) -> ServerAnswers:
        assert (url, api_key) == ("http://server:1", "key")
        return ServerAnswers(url, 404, None, 404, None, None)

    monkeypatch.setattr(doctor, "ask_server", ask)
    result = run("doctor", "--url", "http://server:1", "--api-key", "key")
    assert result.exit_code == Exit.FAILED
    assert "2 problems" in result.stdout


def test_doctor_asks_nobody(unused_port: int) -> None:
    assert run("doctor", "--url", f"http://127.0.0.1:{unused_port}").exit_code == Exit.UNREACHABLE


# ---- demo ----


@pytest.mark.parametrize("status", [0, 1, 130])
def test_demo_passes_its_options_on_and_its_status_back(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    called = []

    def play(*args: Any, **kwargs: Any) -> int:
        called.append((args, kwargs))
        return status

    monkeypatch.setattr(demo, "run", play)
    options = ["--prompt-tokens", "700", "--trials", "2", "--output", "out", "--model", "m", "--cpu"]
    assert run("demo", *options).exit_code == status
    [(args, kwargs)] = called
    assert args == (700, 2, Path("out"))
    assert isinstance(kwargs.pop("console"), Console)
    assert kwargs == {"model": "m", "url": None, "cpu": True}


def test_demo_with_json_prints_the_results_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def play(_tokens: int, _trials: int, output: Path, console: Console, **_options: Any) -> int:
        console.print("the story")
        (output / demo.RESULTS).write_text('{"seen": "it was faster"}\n')
        return 0

    monkeypatch.setattr(demo, "run", play)
    result = run("demo", "--json", "--output", str(tmp_path))
    assert result.exit_code == Exit.OK
    assert json.loads(result.stdout) == {"seen": "it was faster"}
    assert "the story" in result.stderr
    monkeypatch.setattr(demo, "run", lambda *_, **__: 1)
    (tmp_path / demo.RESULTS).unlink()
    assert run("demo", "--json", "--output", str(tmp_path)).stdout == ""


# ---- bench, version, completion ----


def test_recipes_and_releases_speak_json() -> None:
    assert "matrix" in json.loads(run("bench", "recipes", "--json").stdout)
    releases = json.loads(run("version", "--json").stdout)
    assert releases.keys() == {"toolgap", "protocol", "sglang", "supported"}


def test_bench_verify_speaks_json(tmp_path: Path) -> None:
    result = run("bench", "verify", "--json", str(tmp_path))
    assert result.exit_code == Exit.FAILED
    [(folder, problems)] = json.loads(result.stdout).items()
    assert folder == str(tmp_path)
    assert problems


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "toolgap"],
        env={
            **os.environ,
            "_TOOLGAP_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": "toolgap re",
            "COMP_CWORD": "1",
        }
        | {"_TYPER_COMPLETE_ARGS": "toolgap re", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        capture_output=True,
        text=True,
    )
    assert "resolve" in result.stdout
