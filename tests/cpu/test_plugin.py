import logging
import multiprocessing
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from toolgap.cpu import plugin


def test_inactive_it_does_nothing_and_imports_nothing() -> None:
    code = (
        "import os, sys\n"
        "os.environ.pop('TOOLGAP_CPU', None)\n"
        "from toolgap.cpu.plugin import register\n"
        "register()\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Target:
    def method(self, first: int, second: int = 0, *, third: int = 0) -> tuple[int, int, int]:
        return first, second, third


TARGET = f"{__name__}.Target.method"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Target.__module__])


def hook(kind: str, *parameters: str, target: str = TARGET) -> plugin.CpuHook:
    return plugin.CpuHook(target, kind, lambda: None, parameters)


def test_a_fitting_target_is_no_mismatch() -> None:
    assert plugin.mismatch(hook("REPLACE", "first", "second", "third")) is None
    assert plugin.mismatch(hook("BEFORE", "third")) is None


@pytest.mark.parametrize(
    "changed",
    [
        hook("REPLACE", "first", "second"),
        hook("REPLACE", "second", "first", "third"),
        hook("BEFORE", "fourth"),
        hook("AFTER", "first", target=f"{__name__}.Target.gone"),
        hook("AFTER", "first", target=f"{__name__}.Gone.method"),
        hook("AFTER", "first", target="no_such_package.method"),
    ],
)
def test_a_mismatch_names_the_target(changed: plugin.CpuHook) -> None:
    assert changed.target in (plugin.mismatch(changed) or "")


@pytest.mark.engine
def test_the_installed_sglang_fits() -> None:
    with warnings.catch_warnings():
        # What is missing on this machine is none of this test's business.
        warnings.simplefilter("ignore")
        pytest.importorskip("sglang.srt.entrypoints.engine")
        hooks = [*plugin.cpu_hooks(), plugin.FORK_HOOK]
        assert [plugin.mismatch(hook) for hook in hooks] == [None] * len(hooks)
    assert plugin._reserve_problems() == []


def test_a_mismatch_stops_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changed = hook("BEFORE", "fourth")
    monkeypatch.setenv("TOOLGAP_CPU", "1")
    monkeypatch.setattr(plugin, "cpu_hooks", lambda: [changed])
    monkeypatch.setattr(plugin, "_reserve_problems", list)
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit, match="cannot run SGLang"):
        plugin.register()
    assert TARGET in caplog.text


def test_forced_arguments_win_however_they_are_passed() -> None:
    force = plugin.force_arguments(TARGET, second=7, third=8)
    for arguments, named in (((1,), {}), ((1, 2), {"third": 3}), ((1,), {"second": 2})):
        args, kwargs = force(Target(), *arguments, **named)
        assert Target.method(*args, **kwargs) == (1, 7, 8)


@pytest.mark.parametrize(("replicas", "method"), [(1, "fork"), (2, None)])
def test_processes_are_forked_only_by_a_parent_without_threads(
    monkeypatch: pytest.MonkeyPatch, replicas: int, method: str | None
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda name, force: chosen.append(name))
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: None)
    plugin.fork(None, SimpleNamespace(dp_size=replicas, attn_dp_size=1))
    assert chosen == ([method] if method else [])


def test_a_failing_transfer_is_not_masked() -> None:
    engine = SimpleNamespace(device_to_host_stream=SimpleNamespace(), host_to_device_stream=SimpleNamespace())
    plugin.add_stream_synchronize(None, engine)
    engine.device_to_host_stream.synchronize()
    engine.host_to_device_stream.synchronize()


def test_no_device_means_the_cpu() -> None:
    asked: list[object] = []
    plugin.device_module(asked.append)
    plugin.device_module(asked.append, "cuda")
    assert asked == ["cpu", "cuda"]
