"""What a run was measured on: machine, software, and digests of the code, for its manifest.

Everything comes from files and package metadata; neither torch nor SGLang is imported. A manifest is
published, so nothing here names a host, a user or an absolute path.
"""

import base64
import csv
import hashlib
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import toolgap
from toolgap.bench.evidence import sha256
from toolgap.hardware import describe_cpu
from toolgap.sglang.internals import targets

PACKAGES = (
    "toolgap",
    "sglang",
    "torch",
    "triton",
    "transformers",
    "sglang-kernel",
    "numpy",
    "httpx",
    "msgspec",
)
NVIDIA_SMI_TIMEOUT_S = 20.0
BLOCK_DEVICES = Path("/sys/dev/block")
MOUNTINFO = Path("/proc/self/mountinfo")


def hardware(storage: Path | None = None) -> dict[str, Any]:
    """CPU, memory, kernel and GPUs, and what a storage folder lies on.

    Args:
        storage: The folder; it need not exist yet.
    """
    cpu, _, _ = describe_cpu().rpartition(", ")
    facts: dict[str, Any] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "gpus": _gpus(),
    }
    if storage is not None:
        facts["storage"] = _filesystem(storage)
    return facts


def software() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def toolgap_digests(package: Path = Path(toolgap.__file__).parent) -> dict[str, str]:
    """SHA-256 of every file of a package's folder but bytecode, by its path from the folder's parent."""
    files = {path.relative_to(package.parent).as_posix(): path for path in package.rglob("*")}
    return {
        name: sha256(path)
        for name, path in sorted(files.items())
        if path.is_file() and not _is_bytecode(name)
    }


def sglang_digests() -> dict[str, str]:
    """SHA-256 of the SGLang modules that hold what Toolgap hooks or calls, by path in the installation.

    Raises:
        ValueError: SGLang is not installed, or has no module for one of the names.
    """
    root = Path(str(_distribution("sglang").locate_file("")))
    names = {_module_file(root, target) for target in targets.touched()}
    return {name: sha256(root / name) for name in sorted(names)}


def changed_files(distribution: str) -> list[str]:
    """Files of an installed distribution that are gone or not as its RECORD says, without bytecode.

    Empty if the files are exactly as in its wheel. Files that RECORD does not know are not looked for.

    Raises:
        ValueError: it is not installed, or has no RECORD.
    """
    found = _distribution(distribution)
    # Python 3.12's Distribution.files leaves out those that are gone.
    record = found.read_text("RECORD")
    if record is None:
        raise ValueError(f"{distribution} has no RECORD: it was not installed from a wheel")
    return sorted(
        name
        for name, recorded, _ in csv.reader(record.splitlines())
        if not _is_bytecode(name) and not _is_as_recorded(Path(str(found.locate_file(name))), recorded)
    )


def plugins() -> list[str]:
    """SGLang's plugins in this environment, each as ``name (distribution version)``."""
    found = []
    for entry in metadata.entry_points(group="sglang.srt.plugins"):
        source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
        found.append(f"{entry.name} ({source})")
    return sorted(found)


def _gpus() -> list[dict[str, Any]]:
    """Every GPU that the NVIDIA driver tells of; none if it tells nothing."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, encoding="utf-8", errors="replace", timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in row.split(",")] for row in done.stdout.splitlines()]
    return [
        {"name": row[0], "memory_bytes": _mebibytes(row[1]), "driver": row[2]}
        for row in rows
        if len(row) == 3
    ]


def _mebibytes(text: str) -> int | None:
    """Bytes of an amount such as ``143771 MiB``; None where the driver does not know it."""
    amount, _, unit = text.partition(" ")
    return int(amount) << 20 if amount.isdecimal() and unit == "MiB" else None


class _Mount(NamedTuple):
    device_number: str
    """``major:minor``."""
    point: Path
    filesystem: str
    source: str


def _filesystem(folder: Path) -> dict[str, str | None]:
    """The type of a folder's filesystem, and the kernel's name of its block device; None if unknown.

    A mount's source may name a host, a user or a path: only the name of a block device is told.
    """
    folder = folder.resolve()
    best: _Mount | None = None
    for mount in _mounts():
        # Of two at one place, the later covers the earlier.
        if folder.is_relative_to(mount.point) and (
            best is None or len(mount.point.parts) >= len(best.point.parts)
        ):
            best = mount
    if best is None:
        return {"filesystem": None, "device": None}
    return {"filesystem": best.filesystem, "device": _block_device(best)}


def _mounts() -> list[_Mount]:
    """The mounts that this process sees, in the order they were made (proc_pid_mountinfo(5))."""
    try:
        # Not splitlines(): a mount point may hold what Unicode calls a line's end.
        lines = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return []
    mounts = []
    for line in lines:
        place, kind = (part.split(" ") for part in line.partition(" - ")[::2])
        if len(place) > 4 and len(kind) > 1:
            mounts.append(_Mount(place[2], Path(_unescape(place[4])), kind[0], _unescape(kind[1])))
    return mounts


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _block_device(mount: _Mount) -> str | None:
    numbers = [mount.device_number]
    source = Path(mount.source)
    # A btrfs mount has a number of its own, which is no device's.
    with suppress(OSError):
        if source.is_block_device():
            number = source.stat().st_rdev
            numbers.append(f"{os.major(number)}:{os.minor(number)}")
    for device in (BLOCK_DEVICES / number for number in numbers):
        if device.exists():
            return device.resolve().name
    return None


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise ValueError(f"{name} is not installed here") from None


def _module_file(root: Path, target: str) -> str:
    """The module of a function, or of a class's method, from the folder that packages lie in."""
    parts = target.split(".")
    for length in (len(parts) - 1, len(parts) - 2):
        stem = "/".join(parts[:length])
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if (root / name).is_file():
                return name
    raise ValueError(f"the installed package has no module that could hold {target}")


def _is_bytecode(name: str) -> bool:
    return name.endswith((".pyc", ".pyo")) or "__pycache__" in name.split("/")


def _is_as_recorded(path: Path, recorded: str) -> bool:
    """Whether a file is there with the hash that RECORD has for it (it has none for itself)."""
    if not recorded:
        return path.is_file()
    algorithm, _, expected = recorded.partition("=")
    try:
        digest = hashlib.new(algorithm, path.read_bytes()).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == expected
