"""Renews and checks the locks: requirements/engine-cpu.txt, the pinned environment of the CPU engine, and
requirements/agents.txt, that of the agent libraries.

    .venv/bin/python scripts/lock.py renew           asks the package index and rewrites the engine's pins
    .venv/bin/python scripts/lock.py check           compares them with what is installed, offline
    .venv-agents/bin/python scripts/lock.py renew agents    the same for the agent libraries
    .venv-agents/bin/python scripts/lock.py check agents

A full install of SGLang is some 11 GB, much of it CUDA kernels that a CPU launch never imports. The
lock is that full resolution less the names in requirements/left-out.txt, so every version in it is
one that SGLang's own metadata admits beside the rest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ROOT / "requirements" / "left-out.txt"
AGENTS_IN = ROOT / "requirements" / "agents.in"

# What the extras do not say: the project is built without isolation from this environment, in
# editable form, by this pip.
BUILD_TOOLS = ("editables", "pip")


class Lock(NamedTuple):
    """One lock, and what it is cut from."""

    path: Path
    extras: tuple[str, ...]
    """Of pyproject.toml."""
    added: Path | None = None
    """A file of requirements that no extra has."""
    left_out: Path | None = None
    """A file of names that are asked for and not installed."""


ENGINE = Lock(
    ROOT / "requirements" / "engine-cpu.txt", ("cpu", "gateway", "store", "test"), left_out=LEFT_OUT
)
AGENTS = Lock(
    ROOT / "requirements" / "agents.txt",
    ("openai-agents", "langchain", "litellm", "claude-code", "fastmcp", "opentelemetry"),
    added=AGENTS_IN,
)


def entries(text: str) -> Iterator[str]:
    """The lines of a requirements file without comments and blanks."""
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if entry:
            yield entry


def parse_pins(text: str) -> dict[str, str]:
    """Canonical name to version; anything but `name==version` is an error."""
    pins: dict[str, str] = {}
    for entry in entries(text):
        name, separator, version = entry.partition("==")
        if not separator or not version.strip():
            raise ValueError(f"not a pin: {entry!r} (expected name==version)")
        key = canonicalize_name(name.strip())
        if key in pins:
            raise ValueError(f"{key} is pinned twice")
        pins[key] = version.strip()
    return pins


def header(text: str) -> str:
    """The comment block that a lock starts with; it survives a renewal."""
    lines = []
    for line in text.splitlines(keepends=True):
        if not line.startswith("#"):
            break
        lines.append(line)
    return "".join(lines)


def wanted(pyproject: Mapping[str, Any], lock: Lock) -> list[str]:
    """Every requirement whose resolution a lock is cut from."""
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    return [
        *project["dependencies"],
        *(requirement for extra in lock.extras for requirement in extras[extra]),
        *(entries(lock.added.read_text(encoding="utf-8")) if lock.added is not None else ()),
        *pyproject["build-system"]["requires"],
        *BUILD_TOOLS,
    ]


def resolve(requirements: Iterable[str]) -> dict[str, str]:
    """What pip would install for these today, on this Python and platform."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), *requirements]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    metadata = [item["metadata"] for item in installs]
    return {canonicalize_name(item["name"]): str(item["version"]) for item in metadata}


def unmet(
    pins: Mapping[str, str], left_out: Iterable[str], requirements: Iterable[tuple[str, str]]
) -> list[str]:
    """The requirements, as (who asks, what for), that neither a pin nor the left-out list settles."""
    excused = set(left_out)
    problems = []
    for asker, text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in pins:
            if not requirement.specifier.contains(pins[name], prereleases=True):
                problems.append(f"{asker} needs {requirement}, the lock has {name}=={pins[name]}")
        elif name not in excused:
            problems.append(f"{asker} needs {requirement}, which is neither locked nor left out")
    return problems


def installed_requirements(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What the installed distributions of these names say they need."""
    keep = set(names)
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in keep:
            for requirement in distribution.requires or ():
                yield name, requirement


def read_left_out(lock: Lock) -> set[str]:
    text = "" if lock.left_out is None else lock.left_out.read_text(encoding="utf-8")
    return {str(canonicalize_name(entry)) for entry in entries(text)}


def read_pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def check(lock: Lock = ENGINE) -> list[str]:
    """Everything wrong between pyproject.toml, the lock, the left-out list and what is installed."""
    pins = parse_pins(lock.path.read_text(encoding="utf-8"))
    left_out = read_left_out(lock)
    problems = [f"{name} is both locked and left out" for name in sorted(left_out & set(pins))]
    asked = [("pyproject.toml", text) for text in wanted(read_pyproject(), lock)]
    problems += unmet(pins, left_out, asked)
    problems += unmet(pins, left_out, installed_requirements(pins))
    return problems


def renew(lock: Lock) -> None:
    old_text = lock.path.read_text(encoding="utf-8")
    old = parse_pins(old_text)
    left_out = read_left_out(lock)
    resolved = resolve(wanted(read_pyproject(), lock))
    new = {name: resolved[name] for name in sorted(resolved) if name not in left_out}
    body = "".join(f"{name}=={version}\n" for name, version in new.items())
    lock.path.write_text(header(old_text) + "\n" + body, encoding="utf-8")
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, "-"), new.get(name, "-")
        if before != after:
            print(f"{name}: {before} -> {after}")
    for name in sorted(left_out - resolved.keys()):
        print(f"{name}: left out, and no longer asked for; delete its line in its list")


NAMES: tuple[list[str], ...] = ([], ["agents"])
"""Of a lock on the command line."""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["renew", *names] if names in NAMES:
            renew(AGENTS if names else ENGINE)
            return 0
        case ["check", *names] if names in NAMES:
            lock = AGENTS if names else ENGINE
            problems = check(lock)
            for problem in problems:
                print(problem, file=sys.stderr)
            if not problems:
                print(f"{lock.path.name}: consistent")
            return 1 if problems else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
