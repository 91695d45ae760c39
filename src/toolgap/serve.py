"""``toolgap serve``: SGLang's own server with Toolgap's settings, in place of this process."""

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from toolgap.settings import Settings, variable
from toolgap.store import config as stores

PLUGIN = "toolgap"
"""Name of Toolgap's entry point in SGLang's group."""

INSTALL = "pip install 'toolgap[sglang]'"

MODEL_FLAGS = ("--model-path", "--model")

BACKEND_FLAG, EXTRA_FLAG = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"

STORE_FLAGS = (("--enable-hierarchical-cache", None), ("--hicache-mem-layout", "page_first"))
"""What a store needs, or reads fastest with, where the user says nothing else."""


class ServeError(Exception):
    """The server cannot be started as asked; the text says what to do."""


class Launch(NamedTuple):
    """A command and the environment that it runs in."""

    command: list[str]
    environment: dict[str, str]

    def changes(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that differ from `environ`."""
        return {name: value for name, value in self.environment.items() if environ.get(name) != value}

    def as_shell(self, environ: Mapping[str, str]) -> str:
        """A shell command that does the same from `environ`."""
        changes = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.changes(environ).items())]
        return " \\\n  ".join([*changes, shlex.join(self.command)])


def plan(
    arguments: Sequence[str],
    settings: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    cpu: bool = False,
    model: str | None = None,
    store: stores.StoreConfig | None = None,
    default_cpu_model: Callable[[], Path],
) -> Launch:
    """What to run.

    Args:
        arguments: SGLang's.
        settings: Fields of :class:`Settings` to set; None leaves the environment's.
        environ: The environment to start from.
        cpu: Whether to run on a CPU.
        model: SGLang's ``--model-path``, if not among the arguments.
        store: Toolgap's store as L3; None leaves storage to the arguments.
        default_cpu_model: The model to take with `cpu` where none is named; may take its time.

    Raises:
        ServeError: two models or two storage backends are named, or the environment asks for an HTTP server without
            plugins.
        SettingsError: a setting has a value that cannot be used.
    """
    if wants_rust_server(environ):
        raise ServeError("SGLANG_RUST_SERVER selects an HTTP server that loads no plugins: unset it")
    given = {variable(name): str(value) for name, value in settings.items() if value is not None}
    environment = _with_plugin(dict(environ) | given)
    Settings.from_environ(environment)
    # As activating the environment would: SGLang looks for ninja on PATH when it compiles.
    environment["PATH"] = _with_folder(environment.get("PATH", ""), str(Path(sys.executable).parent))
    arguments = _with_model(arguments, model, default_cpu_model if cpu else None)
    if store is not None:
        arguments = with_store(arguments, store)
    if cpu:
        from toolgap.cpu.launch import cpu_arguments, cpu_environment

        arguments = cpu_arguments(arguments)
        environment = cpu_environment(environment, arguments)
    return Launch([sys.executable, "-m", "sglang.launch_server", *arguments], environment)


def _with_plugin(environment: dict[str, str]) -> dict[str, str]:
    """Let ``SGLANG_PLUGINS``, a list of the plugins that may load, allow Toolgap's."""
    allowed = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and PLUGIN not in allowed:
        environment["SGLANG_PLUGINS"] = ",".join([*allowed, PLUGIN])
    return environment


def _with_folder(path: str, folder: str) -> str:
    folders = [part for part in path.split(os.pathsep) if part]
    return path if folder in folders else os.pathsep.join([folder, *folders])


def _with_model(arguments: Sequence[str], model: str | None, default: Callable[[], Path] | None) -> list[str]:
    named = {argument.partition("=")[0] for argument in arguments}
    if model is not None:
        if not named.isdisjoint(MODEL_FLAGS):
            raise ServeError("the model is named twice: by --model and among SGLang's arguments")
        return ["--model-path", model, *arguments]
    # A --config file may name the model too.
    if default is not None and named.isdisjoint((*MODEL_FLAGS, "--config")):
        return ["--model-path", str(default()), *arguments]
    return list(arguments)


def with_store(arguments: Sequence[str], store: stores.StoreConfig) -> list[str]:
    """SGLang's arguments with the store as L3; what is there for the same extra config is kept.

    Raises:
        ServeError: the arguments name another storage backend, or an extra config that cannot be added to.
    """
    given = dict(_flags(arguments))
    if BACKEND_FLAG in given:
        raise ServeError(f"two storage backends are named: leave out {BACKEND_FLAG}, or --store")
    others = _extra(given.get(EXTRA_FLAG))
    kept = [part for flag, part in _parts(arguments) if flag != EXTRA_FLAG]
    for flag, value in STORE_FLAGS:
        if flag not in given:
            kept += [flag] if value is None else [flag, value]
    return [*kept, *stores.arguments(store, others)]


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServeError(f"with --store, {EXTRA_FLAG} must be a JSON object: {text}")
    return found


def _parts(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each argument with the flag that it belongs to."""
    flag = ""
    for part in arguments:
        if part.startswith("--"):
            flag = part.partition("=")[0]
        yield flag, part


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its last value; empty for a switch."""
    for flag, part in _parts(arguments):
        yield flag, part.partition("=")[2] if part.startswith("--") else part


def wants_rust_server(environ: Mapping[str, str]) -> bool:
    """Whether SGLang would replace its Python HTTP server, and with it every plugin's routes."""
    # SGLang's own spellings of true.
    return environ.get("SGLANG_RUST_SERVER", "").lower() in ("true", "1", "yes", "y")


def require_sglang() -> None:
    """Raise ServeError unless SGLang is installed."""
    if importlib.util.find_spec("sglang") is None:
        raise ServeError(f"SGLang is not installed in {sys.prefix}: {INSTALL}")


def execute(launch: Launch) -> NoReturn:
    """Become the server: signals and the exit status are SGLang's own from here on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(launch.command[0], launch.command, launch.environment)  # noqa: S606 - no shell, by intent
