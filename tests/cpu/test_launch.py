import os
from pathlib import Path

import pytest

from toolgap.cpu.launch import (
    DEFAULTS,
    STAND_IN,
    cpu_arguments,
    cpu_environment,
    thread_binding,
)


def value_of(arguments: list[str], flag: str) -> str:
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_adds_what_a_cpu_needs() -> None:
    arguments = cpu_arguments(["--model-path", "m"])
    assert value_of(arguments, "--device") == "cpu"
    assert value_of(arguments, "--attention-backend") == "torch_native"
    assert value_of(arguments, "--sampling-backend") == "pytorch"
    assert value_of(arguments, "--hicache-mem-layout") == "layer_first"
    assert value_of(arguments, "--hicache-io-backend") == "kernel"
    assert value_of(arguments, "--hicache-storage-backend") == "file"
    assert "--enable-hierarchical-cache" in arguments
    assert "--disable-overlap-schedule" in arguments


def test_the_users_arguments_come_last_and_unchanged() -> None:
    given = ["--model-path", "m", "--port", "1", "--hicache-rat", "3"]
    assert cpu_arguments(given)[-len(given) :] == given


@pytest.mark.parametrize("given", [["--page-size", "64"], ["--page-size=64"]], ids=["two words", "one word"])
def test_a_given_flag_is_left_alone(given: list[str]) -> None:
    arguments = cpu_arguments(given)
    assert [word for word in arguments if word.startswith("--page-size")] == given[:1]


def test_a_flags_value_is_not_taken_for_a_flag() -> None:
    assert value_of(cpu_arguments(["--served-model-name", "device"]), "--device") == "cpu"


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda default: default.flag)
def test_every_default_can_be_overridden(default: object) -> None:
    assert isinstance(default, type(DEFAULTS[0]))
    given = [default.flag] if default.value is None else [default.flag, "mine"]
    arguments = cpu_arguments(given)
    assert arguments.count(default.flag) == 1
    assert arguments[-len(given) :] == given


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda default: default.flag)
def test_a_default_yields_to_flags_that_decide_the_same(default: object) -> None:
    assert isinstance(default, type(DEFAULTS[0]))
    for other in default.yields_to:
        assert default.flag not in cpu_arguments([other])


def test_without_a_radix_cache_there_is_no_hicache() -> None:
    arguments = cpu_arguments(["--disable-radix-cache"])
    assert not [word for word in arguments if "hicache" in word or "hierarchical" in word]


def test_a_config_file_counts_as_given(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("page_size: 64\nhicache-ratio: 1.5\nnested:\n  dtype: x\n")
    arguments = cpu_arguments(["--config", str(config)])
    assert "--page-size" not in arguments
    assert "--hicache-ratio" not in arguments
    assert "--dtype" in arguments


def test_defaults_give_their_reason() -> None:
    assert all(default.why for default in DEFAULTS)
    assert len({default.flag for default in DEFAULTS}) == len(DEFAULTS)


def test_environment_switches_cpu_mode_on() -> None:
    environment = cpu_environment({})
    assert environment["TOOLGAP_CPU"] == "1"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["PYTHONPATH"] == str(STAND_IN)
    assert "HF_HUB_OFFLINE" not in environment
    assert "SGLANG_PLUGINS" not in environment


def test_environment_keeps_what_is_set_and_its_input() -> None:
    given = {"PATH": "/bin", "PYTHONPATH": "/a:/b", "SGLANG_USE_CPU_ENGINE": "0"}
    before = dict(given)
    environment = cpu_environment(given)
    assert given == before
    assert environment["PATH"] == "/bin"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "0"
    assert environment["PYTHONPATH"] == os.pathsep.join([str(STAND_IN), "/a", "/b"])


def test_environment_is_the_same_when_applied_twice() -> None:
    once = cpu_environment({"PYTHONPATH": "/a"})
    assert cpu_environment(once) == once


def test_a_plugin_whitelist_gets_the_cpu_plugin() -> None:
    assert cpu_environment({"SGLANG_PLUGINS": "toolgap"})["SGLANG_PLUGINS"] == "toolgap,toolgap_cpu"
    listed = {"SGLANG_PLUGINS": "toolgap_cpu, toolgap"}
    assert cpu_environment(listed)["SGLANG_PLUGINS"] == listed["SGLANG_PLUGINS"]


def test_a_local_model_needs_no_hub(tmp_path: Path) -> None:
    assert cpu_environment({}, [f"--model-path={tmp_path}"])["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in cpu_environment({}, ["--model", "owner/name"])
    chosen = cpu_environment({"HF_HUB_OFFLINE": "0"}, ["--model", str(tmp_path)])
    assert chosen["HF_HUB_OFFLINE"] == "0"


def test_several_ranks_share_the_cores() -> None:
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    assert name not in cpu_environment({}, ["--tp-size", "1"])
    assert cpu_environment({}, ["--tp", "2", "--pp-size=2"])[name].count("|") == 3
    assert cpu_environment({name: "0|0"}, ["--dp", "2"])[name] == "0|0"


@pytest.mark.parametrize(
    ("ranks", "cores", "binding"),
    [
        (1, [0, 1], "0,1"),
        (2, [0, 1], "0|1"),
        (2, [4, 5, 6, 7, 8], "4,5|6,7"),
        (3, [0, 1], "0|1|0"),
        (2, [3], "3|3"),
    ],
)
def test_thread_binding(ranks: int, cores: list[int], binding: str) -> None:
    assert thread_binding(ranks, cores) == binding
