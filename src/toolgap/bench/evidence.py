"""A run's folder: its manifest, its trials, and what is made of them."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from toolgap.bench.errors import BenchError
from toolgap.bench.plan import Plan

MANIFEST, TRIALS, REPORT = "manifest.json", "trials.jsonl", "report.md"

T = TypeVar("T")


class Manifest(msgspec.Struct, kw_only=True):
    """What a run was measured on, and what it was to do."""

    schema: int = 1
    run: str
    """The folder's name."""
    began: str
    """ISO 8601, UTC."""
    plan: Plan
    model: str
    hardware: dict[str, Any]
    software: dict[str, str]
    server_arguments: list[str]
    """Of every server, without ports, keys and paths."""
    server_environment: dict[str, str]
    engine: dict[str, Any]
    """What the engine said of itself at the start."""
    differences_from_stock: list[str]
    """What differs from a stock installation of SGLang and its stock defaults."""
    sglang_files_changed: list[str]
    """Files of the installed SGLang that are not as in its package; empty if it is stock."""
    toolgap_sha256: dict[str, str]
    sglang_sha256: dict[str, str]
    """Of the files that hold what Toolgap hooks or calls."""

    def same_run(self) -> dict[str, Any]:
        """What must be equal for a run to be resumed."""
        return {
            "plan": msgspec.to_builtins(self.plan),
            "model": self.model,
            "server_arguments": self.server_arguments,
            "server_environment": self.server_environment,
            "software": self.software,
            "toolgap_sha256": self.toolgap_sha256,
            "sglang_sha256": self.sglang_sha256,
            "hardware": self.hardware,
        }


class Evidence(Generic[T]):
    """The folder of a run, open for more trials of one type."""

    def __init__(self, folder: Path, trial_type: type[T]) -> None:
        self.folder = folder
        self._decoder = msgspec.json.Decoder(trial_type)
        self.manifest: Manifest
        self.trials: list[T] = []

    @classmethod
    def load(cls, folder: Path, trial_type: type[T]) -> "Evidence[T]":
        """Read a run.

        Raises:
            BenchError: the folder holds none, or a file in it cannot be read.
        """
        evidence = cls(folder, trial_type)
        evidence.manifest = read_manifest(folder)
        try:
            lines = (folder / TRIALS).read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        for number, line in enumerate(lines, 1):
            try:
                evidence.trials.append(evidence._decoder.decode(line))
            except msgspec.DecodeError as error:
                raise BenchError(f"{folder / TRIALS}, line {number}: {error}") from None
        return evidence

    @classmethod
    def open(cls, folder: Path, trial_type: type[T], manifest: Manifest) -> "Evidence[T]":
        """Start a run, or go on with one that was interrupted.

        Raises:
            BenchError: the folder holds a run of another plan, code, model or machine, or cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(folder / TRIALS)
        except OSError as error:
            raise BenchError(f"cannot write to {folder}: {error.strerror}") from error
        if not (folder / MANIFEST).exists():
            if (folder / TRIALS).exists():
                raise BenchError(f"{folder} has trials and no manifest: choose another folder")
            write(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        check_same_run(folder, manifest)
        return cls.load(folder, trial_type)

    def append(self, trial: T) -> None:
        """Add a trial; it survives whatever comes next."""
        with (self.folder / TRIALS).open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.trials.append(trial)


def check_same_run(folder: Path, manifest: Manifest, unknown: Sequence[str] = ()) -> None:
    """Check that a folder's run, if it holds one, can go on under a manifest.

    Args:
        folder: A run's folder, or one that is not there yet.
        manifest: What the run would be measured on now.
        unknown: What of :meth:`Manifest.same_run` the manifest does not know yet.

    Raises:
        BenchError: it cannot; the differences are named.
    """
    if not (folder / MANIFEST).exists():
        return
    before, now = read_manifest(folder).same_run(), manifest.same_run()
    for name in unknown:
        before.pop(name)
        now.pop(name)
    if differing := differences(before, now):
        raise BenchError(
            f"{folder} holds another run, which cannot go on here; different are: {', '.join(differing)}. "
            "Choose another folder, or go back to what it was measured with"
        )


def read_manifest(folder: Path) -> Manifest:
    """A run's manifest.

    Raises:
        BenchError: there is none, or it is none.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BenchError(f"{folder} holds no run: there is no {MANIFEST}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{folder / MANIFEST}: {error}") from None


def differences(one: Any, other: Any, path: str = "", limit: int = 5) -> list[str]:
    """Where two JSON values differ, as paths; at most ``limit`` of them."""
    if isinstance(one, dict) and isinstance(other, dict):
        found: list[str] = []
        for key in sorted(one.keys() | other.keys()):
            if len(found) < limit:
                found += differences(
                    one.get(key), other.get(key), f"{path}.{key}" if path else str(key), limit
                )
        return found[:limit]
    return [] if one == other else [path]


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _drop_torn_line(path: Path) -> None:
    """What a run that was killed has not finished writing is not a trial."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write(path, whole)
