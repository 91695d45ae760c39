"""A store's folder: whose it is, and whether it can be written.

::

    namespace.json     whose pages these are
    index.log          what is where
    lock               held while the index is appended to
    segments/*.seg     the pages
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from toolgap.store.errors import StoreError
from toolgap.store.files import sync_folder, write_all
from toolgap.store.namespace import Namespace
from toolgap.store.segments import NAMESPACE_BYTES, namespace_of, segment_path, segments

_VERSION = 2


class _Label(msgspec.Struct):
    version: int
    digest: str
    namespace: Namespace


def settle(path: Path, namespace: Namespace | None) -> tuple[Namespace, bool]:
    """Whose folder it is, made for this namespace if it is nobody's; and whether it can be written.

    Args:
        path: the folder; it need not exist.
        namespace: the namespace it must have; None for whichever it has.

    Raises:
        StoreError: it has another namespace or version, holds no store and none was asked for, or cannot be used.
    """
    try:
        if namespace is not None:
            (path / "segments").mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            raise StoreError(f"there is no folder {path}")
        with _locked(path) as writable:
            found = _label(path) or _from_segments(path)
            if found is None and namespace is None:
                raise StoreError(f"{path} holds no store: it has no namespace.json, and no segment names one")
            if found is not None and namespace is not None and found != namespace:
                raise StoreError(_refusal(path, found, namespace))
            own = found or namespace
            assert own is not None
            if len(own.encoded()) > NAMESPACE_BYTES:
                raise StoreError(f"the namespace has more than {NAMESPACE_BYTES} bytes: shorten its fields")
            if writable:
                _write_label(path, own)
            elif found is None:
                raise StoreError(f"{path} cannot be written, and holds no store to read")
            return own, writable
    except OSError as error:
        raise StoreError(f"{path} cannot hold a store: {error.strerror or error}") from None


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Keep other processes from labelling it; yields False if it cannot be written, though it may be read."""
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(fd)


def _refusal(path: Path, found: Namespace, wanted: Namespace) -> str:
    fields = "; ".join(
        f"{name} is {getattr(found, name)!r} there and {getattr(wanted, name)!r} here"
        for name in found.differences(wanted)
    )
    return f"{path} is the store of another namespace: {fields}. Give this one a folder of its own."


def _label(path: Path) -> Namespace | None:
    """What namespace.json says; None if it is missing or damaged.

    Raises:
        StoreError: it was written by a release that this one does not know.
        OSError: it cannot be read.
    """
    try:
        label = msgspec.json.decode((path / "namespace.json").read_bytes(), type=_Label)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if label.namespace.digest().hex() != label.digest:
        return None
    if label.version != _VERSION:
        if _from_segments(path) == label.namespace:
            return label.namespace  # a damaged number: these segments are of this version
        raise StoreError(f"{path} is a store of version {label.version}; this release knows {_VERSION}")
    return label.namespace


def _from_segments(path: Path) -> Namespace | None:
    for segment in segments(path):
        try:
            namespace = namespace_of(segment_path(path, segment))
        except OSError:
            continue
        if namespace is not None:
            return namespace
    return None


def _write_label(path: Path, namespace: Namespace) -> None:
    """Have the label right."""
    content = msgspec.json.encode(_Label(_VERSION, namespace.digest().hex(), namespace))
    label = path / "namespace.json"
    if label.exists() and label.read_bytes() == content:
        return
    draft = label.with_suffix(".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(label)
    sync_folder(path)
    sync_folder(path.parent)
