"""Stores to test: one namespace, and pages whose bytes follow from their keys."""

import mmap
from collections.abc import Iterable, Sequence
from hashlib import shake_128

from toolgap.store.namespace import Namespace
from toolgap.store.page import Page
from toolgap.store.store import Store

NAMESPACE = Namespace(
    model="tiny", weights="w1", dtype="float32", layout="page_first", page_size_tokens=16, ranks="1"
)
SIZE = 8192


def payload(key: str, size: int = SIZE) -> bytes:
    """Bytes that no other key has."""
    return shake_128(key.encode()).digest(size)


def pages(keys: Iterable[str], size: int = SIZE) -> list[Page]:
    """Pages to write."""
    return [Page(key, [memoryview(bytearray(payload(key, size)))]) for key in keys]


def blanks(keys: Iterable[str], size: int = SIZE, parts: int = 1) -> list[Page]:
    """Pages to read into, in memory that O_DIRECT takes if the size allows it."""
    made = []
    for key in keys:
        view = memoryview(mmap.mmap(-1, max(1, size)))[:size]
        step = -(-size // parts) or 1
        made.append(Page(key, [view[start : start + step] for start in range(0, size, step)]))
    return made


def content(page: Page) -> bytes:
    return b"".join(page.buffers)


def read_right(store: Store, keys: Sequence[str], size: int = SIZE) -> list[bool]:
    """Which of them the store returns; fails if one has wrong bytes."""
    made = blanks(keys, size)
    there = store.read(made)
    for page, is_there in zip(made, there, strict=True):
        if is_there:
            assert content(page) == payload(page.key, size), f"wrong bytes of {page.key}"
    return there
