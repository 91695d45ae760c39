import importlib.util
from pathlib import Path

import pytest

from toolgap.cpu.launch import STAND_IN
from toolgap.demo import profiles
from toolgap.demo.errors import DemoError
from toolgap.demo.profiles import CONTINUATION_TOKENS, Profile, Sizes


@pytest.mark.parametrize("prompt_tokens", [512, 4096, 4097, 30_000])
def test_sizes_let_operations_hold_the_prefix_and_traffic_overflow_the_tiers(prompt_tokens: int) -> None:
    sizes = Sizes(prompt_tokens)
    assert sizes.l1_tokens >= prompt_tokens + 2 * CONTINUATION_TOKENS
    assert sizes.l1_tokens % 256 == 0
    # TOOLGAP_HOST_SHARE is a half by default.
    assert sizes.l2_tokens / 2 > prompt_tokens
    assert sizes.l2_ratio * sizes.l1_tokens == pytest.approx(sizes.l2_tokens)


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize("cpu", [True, False])
def test_arguments_of_both_profiles(cpu: bool) -> None:
    arguments = Profile(cpu=cpu, hardware="h", model="m").arguments(Sizes(4096), 31_400)
    assert value(arguments, "--max-total-tokens") == "5120"
    assert value(arguments, "--hicache-ratio") == "1.8000"
    assert value(arguments, "--hicache-storage-backend") == "file"
    assert arguments.count("--enable-hierarchical-cache") == 1
    assert ("--device" in arguments) is cpu


def test_the_environment_names_the_storage_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    variable = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
    on_gpu = Profile(cpu=False, hardware="h", model="m").environment([], tmp_path)
    on_cpu = Profile(cpu=True, hardware="h", model="m").environment([], tmp_path)
    assert on_gpu[variable] == on_cpu[variable] == str(tmp_path)
    assert on_gpu["PYTHONPATH"] == "/elsewhere"
    assert on_cpu["PYTHONPATH"].split(":") == [str(STAND_IN), "/elsewhere"]


def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "find_gpu", lambda: "NVIDIA H200")
    chosen = profiles.choose(None, lambda text: None, cpu=None)
    assert chosen == Profile(cpu=False, hardware="NVIDIA H200", model=profiles.GPU_MODEL)
    assert profiles.choose("mine", lambda text: None, cpu=False).model == "mine"


def test_the_cpu_is_taken_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "find_gpu", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        profiles, "ensure_smollm2", lambda report: Path("/models/SmolLM2-135M-Instruct-f32-1")
    )
    chosen = profiles.choose(None, lambda text: None, cpu=None)
    assert chosen.cpu
    assert chosen.model_label == "SmolLM2-135M-Instruct"
    assert profiles.choose("/models/mine/", lambda text: None, cpu=True).model_label == "mine"


def test_a_missing_gpu_and_a_missing_engine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "find_gpu", lambda: None)
    with pytest.raises(DemoError, match="a GPU is asked for"):
        profiles.choose(None, lambda text: None, cpu=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="SGLang is not installed"):
        profiles.choose(None, lambda text: None, cpu=True)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ('{"max_position_embeddings": 8192}', 8192),
        ("{}", None),
        ("[]", None),
        ("not json", None),
        (None, None),
    ],
)
def test_context_of_a_model_folder(tmp_path: Path, config: str | None, context: int | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert profiles.context_tokens(str(tmp_path)) == context


def test_a_prompt_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    profiles.check_context(7680, 8192)
    profiles.check_context(100_000, None)
    with pytest.raises(DemoError, match="7,680 at most, not 7,681"):
        profiles.check_context(7681, 8192)
