"""The machine's C compiler, which SGLang needs too, and what it has made."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O2", "-shared", "-fPIC")
_TIMEOUT_S = 60.0


class CompilerError(Exception):
    """Nothing was compiled; the message says why."""


def found() -> str | None:
    """The compiler that would be used: ``$CC``, cc, gcc or clang; None if there is none."""
    names = (os.environ.get("CC") or "cc", "gcc", "clang")
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


def compiled(source: Path) -> ctypes.CDLL:
    """The library made of one C file: from the cache, else compiled now, which takes a fraction of a second.

    The cache is ``toolgap/native`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; without one that is this user's alone the
    library is compiled for this process.

    Raises:
        CompilerError: there is no compiler, or it fails, or what it makes cannot be loaded.
    """
    try:
        text = source.read_bytes()
        kind = " ".join((*_FLAGS, platform.machine()))
        name = hashlib.sha256(text + b"\0" + kind.encode()).hexdigest()[:16]
        folder = _cache_folder()
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="toolgap-native-") as own:
                return _loaded(_compile(source, Path(own) / f"{name}.so"))
    except OSError as error:
        raise CompilerError(f"there is no place for what is compiled: {error}") from None
    library = folder / f"{name}.so"
    if _is_own(library):
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            pass  # of another system, on a home that several share, or cut: made anew
    return _loaded(_compile(source, library))


def _compile(source: Path, library: Path) -> Path:
    compiler = found()
    if compiler is None:
        raise CompilerError("there is no C compiler (cc)")
    # Complete or not there: other processes may be at the same.
    part = library.with_name(f"{library.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(part), str(source)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            told = next((line for line in done.stderr.splitlines() if "error" in line), "it says nothing")
            raise CompilerError(f"{compiler} fails: {told}")
        # Whatever the umask says: what others can write is not loaded.
        part.chmod(0o755)
        part.replace(library)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{compiler} does not end") from None
    except OSError as error:
        raise CompilerError(f"{compiler} cannot be used: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return library


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompilerError(f"what was compiled cannot be loaded: {error}") from None


def _cache_folder() -> Path | None:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "toolgap" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if _is_own(folder) and os.access(folder, os.W_OK | os.X_OK) else None


def _is_own(path: Path) -> bool:
    """Whether nobody else can have put something there: what is loaded runs as this process."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
