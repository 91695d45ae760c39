"""The command line that ``toolgap serve`` becomes."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from toolgap.serve import Launch, ServeError, plan, with_store
from toolgap.settings import Settings, SettingsError, variable
from toolgap.store.config import StoreConfig

FOLDER = str(Path(sys.executable).parent)
SERVER = [sys.executable, "-m", "sglang.launch_server"]


def no_model() -> Path:
    raise AssertionError("the default model is not wanted here")


def launch(
    arguments: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    model: str | None = None,
) -> Launch:
    return plan(arguments, settings or {}, environ or {}, model=model, default_cpu_model=no_model)


def test_sglangs_arguments_pass_through_untouched() -> None:
    arguments = ["--model-path", "m", "--json", '{"a": 1}', "--", "-x"]
    assert launch(arguments).command == [*SERVER, *arguments]


def test_settings_become_variables_and_none_leaves_the_environments() -> None:
    environ = {"TOOLGAP_MAX_OUTCOMES": "7", "TOOLGAP_HOST_SHARE": "0.9", "HOME": "/home"}
    result = launch(
        [], {"max_operations": 4, "host_share": 0.25, "join": False, "max_outcomes": None}, environ
    )
    assert result.changes(environ) == {
        "TOOLGAP_MAX_OPERATIONS": "4",
        "TOOLGAP_HOST_SHARE": "0.25",
        "TOOLGAP_JOIN": "False",
        "PATH": FOLDER,
    }
    settings = Settings.from_environ(result.environment)
    assert settings == Settings(max_operations=4, host_share=0.25, join=False, max_outcomes=7)
    assert result.environment["HOME"] == "/home"


def test_every_setting_survives_the_way_through_the_environment() -> None:
    changed = Settings(
        max_operations=1,
        max_outcomes=2,
        default_ttl_s=3.5,
        host_share=0.125,
        join=False,
        join_timeout_s=4.5,
        stall_timeout_s=5.5,
        stop_grace_s=6.5,
        max_body_bytes=2048,
        reply_timeout_s=7.5,
    )
    values = {field.name: getattr(changed, field.name) for field in fields(Settings)}
    assert Settings.from_environ(launch([], values).environment) == changed


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        pytest.param({"max_operations": 0}, {}, id="flag"),
        pytest.param({}, {"TOOLGAP_MAX_OPERATIONS": "many"}, id="environment"),
    ],
)
def test_a_setting_that_cannot_be_used_starts_nothing(
    settings: Mapping[str, object], environ: Mapping[str, str]
) -> None:
    with pytest.raises(SettingsError, match=variable("max_operations")):
        launch([], settings, environ)


def test_a_flag_mends_a_bad_variable() -> None:
    result = launch([], {"max_operations": 2}, {"TOOLGAP_MAX_OPERATIONS": "many"})
    assert result.environment["TOOLGAP_MAX_OPERATIONS"] == "2"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        ("", ""),
        ("toolgap, other", "toolgap, other"),
        ("other", "other,toolgap"),
    ],
)
def test_a_list_of_allowed_plugins_gets_toolgap(before: str | None, after: str | None) -> None:
    environ = {} if before is None else {"SGLANG_PLUGINS": before}
    assert launch([], {}, environ).environment.get("SGLANG_PLUGINS") == after


def test_tools_of_this_environment_are_found_without_activating_it() -> None:
    other = os.pathsep.join(["/usr/bin", "/bin"])
    assert launch([], {}, {"PATH": other}).environment["PATH"] == os.pathsep.join([FOLDER, other])
    activated = os.pathsep.join(["/usr/bin", FOLDER])
    assert launch([], {}, {"PATH": activated}).environment["PATH"] == activated


def test_the_model_may_be_an_option() -> None:
    assert launch(["--port", "1"], model="m").command == [*SERVER, "--model-path", "m", "--port", "1"]


@pytest.mark.parametrize("arguments", [["--model-path", "m"], ["--model-path=m"], ["--model", "m"]])
def test_a_model_named_twice(arguments: list[str]) -> None:
    with pytest.raises(ServeError, match="twice"):
        launch(arguments, model="other")


def test_an_http_server_without_plugins_is_not_started() -> None:
    assert launch([], {}, {"SGLANG_RUST_SERVER": "0"})
    with pytest.raises(ServeError, match="SGLANG_RUST_SERVER"):
        launch([], {}, {"SGLANG_RUST_SERVER": "true"})


def test_on_a_cpu_the_defaults_of_the_cpu_profile_are_added() -> None:
    result = plan(["--port", "1"], {}, {}, cpu=True, default_cpu_model=lambda: Path("/models/small"))
    assert result.command[: len(SERVER)] == SERVER
    arguments = result.command[len(SERVER) :]
    assert arguments[arguments.index("--model-path") + 1] == "/models/small"
    assert arguments[arguments.index("--device") + 1] == "cpu"
    assert arguments[-2:] == ["--port", "1"]
    assert result.environment["TOOLGAP_CPU"] == "1"


@pytest.mark.parametrize("arguments", [["--model-path=m"], ["--model", "m"], ["--config", "server.yaml"]])
def test_on_a_cpu_a_model_that_is_named_is_taken(arguments: list[str]) -> None:
    result = plan(arguments, {}, {}, cpu=True, default_cpu_model=no_model)
    assert result.command[-len(arguments) :] == arguments


def test_on_a_cpu_the_model_may_be_an_option() -> None:
    result = plan([], {}, {}, cpu=True, model="m", default_cpu_model=no_model)
    assert result.command[-2:] == ["--model-path", "m"]


def test_the_shell_command_is_quoted_and_shows_changes_only() -> None:
    environ = {"A": "1", "PATH": FOLDER}
    shown = Launch(["python", "--json", '{"a": 1}'], {**environ, "B": "x y"}).as_shell(environ)
    assert shlex.split(shown.replace("\\\n", "")) == ["B=x y", "python", "--json", '{"a": 1}']


def test_a_store_brings_its_flags_and_keeps_what_stands_beside_them() -> None:
    arguments = ["--model-path", "m", "--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64}']
    command = with_store(arguments, StoreConfig(path="/disk/kv", limit_bytes=1 << 30))
    assert command[:2] == ["--model-path", "m"]
    assert "--enable-hierarchical-cache" in command
    assert command[command.index("--hicache-mem-layout") + 1] == "page_first"
    assert command.count("--hicache-storage-backend-extra-config") == 1
    extra = json.loads(command[command.index("--hicache-storage-backend-extra-config") + 1])
    assert (extra["path"], extra["limit_bytes"], extra["prefetch_threshold"]) == ("/disk/kv", 1 << 30, 64)
    assert (extra["module_path"], extra["class_name"]) == ("toolgap.store.hicache", "ToolgapStore")


def test_a_layout_that_was_chosen_stays() -> None:
    command = with_store(
        ["--hicache-mem-layout=layer_first", "--enable-hierarchical-cache"], StoreConfig(path="/disk/kv")
    )
    assert command[:2] == ["--hicache-mem-layout=layer_first", "--enable-hierarchical-cache"]
    assert "page_first" not in command
    assert command.count("--enable-hierarchical-cache") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hicache-storage-backend", "file"], "two storage backends"),
        (["--hicache-storage-backend=file"], "two storage backends"),
        (["--hicache-storage-backend-extra-config", "@store.toml"], "JSON object"),
        (["--hicache-storage-backend-extra-config", "[1]"], "JSON object"),
    ],
)
def test_a_store_beside_another_backend(arguments: list[str], says: str) -> None:
    with pytest.raises(ServeError, match=says):
        with_store(arguments, StoreConfig(path="/disk/kv"))
