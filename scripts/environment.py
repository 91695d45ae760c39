#!/usr/bin/env python3
"""Makes what the tests and the demo run in; does nothing, in a tenth of a second, when it is there.

Two layers, because the dependencies weigh gigabytes and a clone should not:

* the dependency environment: requirements/engine-cpu.txt installed once for all clones, outside of
  them, in ${TOOLGAP_ENV_DIR:-${XDG_CACHE_HOME:-~/.cache}/toolgap/env}/<hash of what it is made of>;
* .venv in this clone: an empty environment that sees the former through a .pth file and holds
  nothing but this project, in editable form.

Each layer has a record that is written last. A layer without one was interrupted and is made anew.

    scripts/environment.py            the engine's, as above
    scripts/environment.py --agents   that of the agent libraries: requirements/agents.txt, agents/ in
                                      that folder, and .venv-agents. SGLang pins an openai that they
                                      are too new for, so that one environment cannot hold both.
    scripts/environment.py --deploy   that of the linters of deploy/: requirements/deploy.txt, deploy/ in
                                      that folder, and .venv-deploy
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

LAYOUT = 1  # raise when environments of an older script must not be used any more
OLDEST, NEWEST = (3, 11), (3, 13)  # the Pythons for which the locked SGLang has wheels
OLDEST_PIP = (22, 3)  # the first with `pip --python`

GIB = 1 << 30

ROOT = Path(__file__).resolve().parent.parent
DEPENDENCY_RECORD = "toolgap-environment.json"
CLONE_RECORD = "toolgap-clone.json"


class ProblemError(Exception):
    """Something the reader can mend; the message says what and how."""


class Tool(NamedTuple):
    """A thing that must be on the system, and the Debian package that has it."""

    what: str
    package: str


class Kind(NamedTuple):
    """One pair of layers. Those of different kinds lie side by side and know nothing of each other."""

    lock: Path
    venv: Path
    subfolder: str
    """Below the folder of the environments: what is old is looked for in a kind's own folder only."""
    environment_gib: float
    downloads_gib: float
    """What pip holds beside the environment while it installs."""
    runs_engine: bool
    """SGLang compiles as it starts: it needs a compiler and headers."""
    programs: tuple[str, ...] = ()
    """Of the dependency environment, those that the clone's has too."""


ENGINE = Kind(
    lock=ROOT / "requirements" / "engine-cpu.txt",
    venv=ROOT / ".venv",
    # Directly in it, where the environments of all clones have been from the start.
    subfolder="",
    environment_gib=6.5,
    downloads_gib=3.0,
    runs_engine=True,
    # SGLang compiles with the one that it finds on PATH.
    programs=("ninja",),
)
AGENTS = Kind(
    lock=ROOT / "requirements" / "agents.txt",
    venv=ROOT / ".venv-agents",
    subfolder="agents",
    environment_gib=0.8,
    downloads_gib=0.3,
    runs_engine=False,
)
DEPLOY = Kind(
    lock=ROOT / "requirements" / "deploy.txt",
    venv=ROOT / ".venv-deploy",
    subfolder="deploy",
    environment_gib=0.3,
    downloads_gib=0.1,
    runs_engine=False,
    programs=("check-jsonschema", "hadolint", "kubernetes-validate", "yamllint"),
)


# --- What an environment is, and where -----------------------------------------------------------


def pins(lock_text: str) -> list[str]:
    """The lock less comments and order, so that rewording its header rebuilds nothing."""
    lines = (line.partition("#")[0].strip() for line in lock_text.splitlines())
    return sorted(line for line in lines if line)


def interpreter_tag() -> str:
    """What binary wheels depend on: `cpython-311-linux-x86_64`, say, `t` for free-threaded."""
    abi = sysconfig.get_config_var("abiflags") or ""
    return f"{sys.implementation.cache_tag}{abi}-{sys.platform}-{platform.machine()}"


def environment_key(lock_text: str, interpreter: str, layout: int = LAYOUT) -> str:
    """Equal for two environments if one can stand for the other."""
    content = json.dumps([layout, interpreter, pins(lock_text)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def environments_folder(variables: Mapping[str, str], home: Path) -> Path:
    """Where the dependency environments lie; relative settings count as unset, as XDG says."""
    own = variables.get("TOOLGAP_ENV_DIR", "")
    if own:
        return Path(own).expanduser().absolute()
    cache = Path(variables.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else home / ".cache") / "toolgap" / "env"


def read_record(path: Path) -> dict[str, Any] | None:
    """A layer's record, or None if it is missing or damaged: both mean the layer is unfinished."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Written whole or not at all."""
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def has_python(environment: Path) -> bool:
    """False also when the interpreter that the environment was made with has gone."""
    return (environment / "bin" / "python").exists()


def is_complete(environment: Path) -> bool:
    return has_python(environment) and read_record(environment / DEPENDENCY_RECORD) is not None


def site_packages(environment: Path) -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return environment / "lib" / version / "site-packages"


def clone_record(dependencies: Path, root: Path, pyproject: bytes) -> dict[str, Any]:
    """All that .venv depends on; when one of these changes it is made anew."""
    return {
        "layout": LAYOUT,
        "dependencies": str(dependencies),
        "clone": str(root),
        "pyproject": hashlib.sha256(pyproject).hexdigest(),
    }


def removable(folder: Path, keep: Path, mapped: frozenset[str]) -> list[Path]:
    """Environments in `folder` that nobody needs: not `keep`, and no process has a file of.

    The folder may be one that the user pointed us to, so only what bears one of our names counts.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir()
        and not path.is_symlink()
        and re.fullmatch(r"[0-9a-f]{16}", path.name)
        and path != keep
        and not any(name.startswith(f"{path}{os.sep}") for name in mapped)
    ]


# --- The system below ----------------------------------------------------------------------------


def mapped_files(processes: Path = Path("/proc")) -> frozenset[str]:
    """Files that running processes have mapped, as far as we may see: ours are those that count."""
    names: set[str] = set()
    for maps in processes.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # ended meanwhile, or another user's
            continue
        names.update(fields[5] for fields in (line.split(None, 5) for line in lines) if fields[5:])
    return frozenset(names)


def free_gib(path: Path) -> float:
    """Free space where `path` is or will be."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free / GIB


def tree_gib(path: Path) -> float:
    """Space that a tree takes, each file once."""
    blocks = {}
    for folder, _, files in os.walk(path):
        for name in files:
            status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - 100,000 files
            blocks[status.st_ino] = status.st_blocks
    return sum(blocks.values()) * 512 / GIB


def compiles(source: str) -> bool:
    """Whether g++ finds what this includes; it is only preprocessed."""
    command = ["g++", "-E", "-x", "c++", "-o", os.devnull, "-"]
    return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0


def base_python() -> str:
    """The interpreter proper, also when a virtual environment's runs this."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def has_pip() -> bool:
    """Whether the interpreter's own pip can install into another environment."""
    answer = subprocess.run([base_python(), "-m", "pip", "--version"], capture_output=True)
    version = re.match(rb"pip (\d+)\.(\d+)", answer.stdout)
    return version is not None and tuple(map(int, version.groups())) >= OLDEST_PIP


def missing_tools(kind: Kind) -> list[Tool]:
    """What is needed besides Python: to install, and for SGLang, which compiles its page hashing."""
    missing = []
    if not has_pip() and importlib.util.find_spec("ensurepip") is None:
        missing.append(Tool(f"pip for {base_python()}", "python3-venv"))
    if not kind.runs_engine:
        return missing
    has_compiler = shutil.which("g++") is not None
    if not has_compiler:
        missing.append(Tool("g++", "g++"))
    if not has_compiler or not compiles("#include <openssl/sha.h>\n"):
        missing.append(Tool("the OpenSSL headers", "libssl-dev"))
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append(Tool(f"the headers of {base_python()}", "python3-dev"))
    return missing


def provide(tools: Sequence[Tool]) -> None:
    """Installs these as root in CI on Debian; tells anybody else how."""
    if not tools:
        return
    packages = " ".join(tool.package for tool in tools)
    what = ", ".join(tool.what for tool in tools)
    if os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {packages}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in ("update -qq", f"install -qq -y --no-install-recommends {packages}"):
            subprocess.run(["apt-get", *step.split()], check=True, env=quiet)
        return
    raise ProblemError(
        f"missing on this system: {what}\n"
        f"  on Debian or Ubuntu:  sudo apt-get install {packages}\n"
        "  elsewhere: install the packages that have these, then run this again"
    )


def require_space(kind: Kind, folder: Path, keep: Path) -> None:
    """Room for an environment, made if need be by removing an old one a little earlier."""
    needed = kind.environment_gib + kind.downloads_gib
    if free_gib(folder) < needed:
        remove_old(folder, keep)
    free = free_gib(folder)
    if free < needed:
        raise ProblemError(
            f"too little disk space: {folder} has {free:.1f} GiB free, the environment needs"
            f" {kind.environment_gib} and {kind.downloads_gib} more while it is installed\n"
            "  free some, or set TOOLGAP_ENV_DIR to a folder on a larger disk"
        )


def require_platform() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ProblemError(
            f"the locked environment is for x86-64 Linux, this is {platform.machine()}"
            f" {platform.system()}\n  use a Linux machine, container or virtual machine"
        )


# --- Building ------------------------------------------------------------------------------------


def say(message: str) -> None:
    print(f"toolgap: {message}", flush=True)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """One line when it starts, one with the seconds when it is through."""
    say(f"{name} ...")
    start = time.monotonic()
    yield
    say(f"{name}: done in {time.monotonic() - start:.0f} s")


@contextmanager
def only_one(folder: Path) -> Iterator[IO[str]]:
    """Holds the folder's lock; a second build waits here, and then finds the first one's result."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build in {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def run(command: Sequence[str], log: Path, lock: IO[str], variables: Mapping[str, str]) -> None:
    """Runs a step of a build: on a terminal in sight, else into `log`, shown if the step fails.

    The step inherits the lock, so that if only we are killed nobody builds over what it still
    writes.
    """
    with log.open("ab") as file:
        output = None if sys.stdout.isatty() else file
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            env={**os.environ, **variables},
            pass_fds=[lock.fileno()],
        )
    if done.returncode:
        if output is not None:
            print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-25:]))
        raise ProblemError(
            f"failed (exit {done.returncode}): {' '.join(command)}\n"
            f"  its output is above{'' if output is None else f' and in {log}'}; if a download"
            " failed, run this again"
        )


def installer(environment: Path, log: Path, lock: IO[str]) -> list[str]:
    """A pip that installs into `environment`: the interpreter's own, or else the one it bundles."""
    python = str(environment / "bin" / "python")
    if has_pip():
        return [base_python(), "-m", "pip", "--python", python]
    run([python, "-m", "ensurepip", "--default-pip"], log, lock, {})
    return [python, "-m", "pip"]


def new_venv(path: Path, log: Path, lock: IO[str]) -> None:
    run([base_python(), "-m", "venv", "--without-pip", str(path)], log, lock, {})


def build_dependencies(kind: Kind, environment: Path, lock: IO[str]) -> None:
    """Makes the dependency environment where it stays: a venv cannot be moved into place."""
    if environment.exists():
        say(f"removing an unfinished build: {environment}")
        shutil.rmtree(environment)
    folder, log = environment.parent, environment.with_suffix(".log")
    log.unlink(missing_ok=True)
    require_space(kind, folder, environment)
    lines = pins(kind.lock.read_text(encoding="utf-8"))
    say(f"dependency environment: {environment}")
    start = time.monotonic()
    name = f"installing {len(lines)} packages ({kind.environment_gib} GiB; minutes)"
    with phase(name):
        new_venv(environment, log, lock)
        # Downloads go beside the environment: /tmp is often too small for them.
        downloads = environment / "downloads"
        downloads.mkdir()
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
        command = [*installer(environment, log, lock), "install", *options, "-r", str(kind.lock)]
        run(command, log, lock, {"TMPDIR": str(downloads)})
        shutil.rmtree(downloads)
    seconds = round(time.monotonic() - start)
    size = tree_gib(environment)
    record = {"layout": LAYOUT, "interpreter": interpreter_tag(), "pins": lines}
    write_record(environment / DEPENDENCY_RECORD, {**record, "gib": size, "seconds": seconds})
    log.unlink(missing_ok=True)
    say(f"dependency environment: {size:.1f} GiB")
    remove_old(folder, environment)


def remove_old(folder: Path, keep: Path) -> None:
    """Leaves one environment in the folder, save those that a running process uses."""
    for path in removable(folder, keep, mapped_files()):
        with phase(f"removing the environment of an older lock, {path.name}"):
            # First the record: what is left of an interrupted removal must not look complete.
            (path / DEPENDENCY_RECORD).unlink(missing_ok=True)
            shutil.rmtree(path)
            path.with_suffix(".log").unlink(missing_ok=True)


def build_clone(kind: Kind, dependencies: Path, record: Mapping[str, Any], lock: IO[str]) -> None:
    """Makes the clone's layer over the dependency environment and installs the project into it."""
    venv = kind.venv
    if venv.exists():
        if not (venv / CLONE_RECORD).exists():
            raise ProblemError(f"{venv} exists and was not made by this script: move it away")
        shutil.rmtree(venv)
    venv.mkdir()
    # The first thing in it, so that it is known as ours even if we are interrupted.
    write_record(venv / CLONE_RECORD, {})
    log = venv / "log"
    with phase(f"installing toolgap into {venv.name}"):
        new_venv(venv, log, lock)
        path_file = site_packages(venv) / "toolgap-dependencies.pth"
        path_file.write_text(f"{site_packages(dependencies)}\n", encoding="utf-8")
        for program in kind.programs:
            (venv / "bin" / program).symlink_to(dependencies / "bin" / program)
        pip = [str(dependencies / "bin" / "python"), "-m", "pip", "--python", f"{venv}/bin/python"]
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        run([*pip, "install", *options, "--editable", str(ROOT)], log, lock, {})
    log.unlink()
    write_record(venv / CLONE_RECORD, record)


def ensure(kind: Kind) -> None:
    """Both layers of a kind, complete and up to date."""
    require_platform()
    folder = environments_folder(os.environ, Path.home()) / kind.subfolder
    key = environment_key(kind.lock.read_text(encoding="utf-8"), interpreter_tag())
    dependencies = folder / key
    record = clone_record(dependencies, ROOT, (ROOT / "pyproject.toml").read_bytes())

    def clone_is_current() -> bool:
        return has_python(kind.venv) and read_record(kind.venv / CLONE_RECORD) == record

    if is_complete(dependencies) and clone_is_current():
        return
    with only_one(folder) as lock:
        provide(missing_tools(kind))
        if not is_complete(dependencies):
            build_dependencies(kind, dependencies, lock)
        if not clone_is_current():
            build_clone(kind, dependencies, record, lock)


# --- The command ---------------------------------------------------------------------------------


def use_supported_python() -> None:
    """Starts over with another Python on PATH if this one is too old or too new for the lock."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        found = shutil.which(f"python3.{minor}")
        # A version manager's stand-in may be on PATH without the Python behind it.
        probe = f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
        if found and subprocess.run([found, "-c", probe], capture_output=True).returncode == 0:
            os.execv(found, [found, *sys.argv])
    have = ".".join(map(str, sys.version_info[:2]))
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    raise ProblemError(
        f"Python {span} is needed, this is {have} and no other was found on PATH\n"
        "  on Debian 12 or newer:  sudo apt-get install python3 python3-venv python3-dev\n"
        "  then, if its name is not python3:  make PYTHON=/path/to/python3.11 env"
    )


def kind_asked_for(arguments: Sequence[str]) -> Kind:
    match arguments:
        case []:
            return ENGINE
        case ["--agents"]:
            return AGENTS
        case ["--deploy"]:
            return DEPLOY
        case _:
            given = " ".join(arguments)
            raise ProblemError(f"unknown arguments: {given}\n  there are only --agents and --deploy")


def main(arguments: Sequence[str]) -> int:
    try:
        kind = kind_asked_for(arguments)
        use_supported_python()
        ensure(kind)
    except ProblemError as problem:
        print(f"toolgap: {problem}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"toolgap: failed: {' '.join(error.cmd)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntoolgap: interrupted; what is unfinished will be made anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
