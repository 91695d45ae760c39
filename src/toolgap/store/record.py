"""One page on disk: a header of one block, then the payload, filled up to whole blocks.

The header names what the page is and where it lies, so that bytes which are whole but of another page, place or
namespace fail as damaged bytes do. The page's checksum covers its identity too.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

BLOCK_BYTES = 4096
"""What O_DIRECT asks addresses, offsets and lengths to be multiples of, on the disks there are."""
IDENTITY_BYTES = 16

_MAGIC = b"TGPAGE\r\n"
_FIELDS = struct.Struct("<8sIIQQQ16s16s32s")
_VERSION = 2
_CHECK_AT = BLOCK_BYTES - 16
KEY_BYTES = _CHECK_AT - _FIELDS.size
"""The longest key, in UTF-8."""
_EMPTY = bytes(BLOCK_BYTES)


class Place(NamedTuple):
    """Where a page lies."""

    segment: int
    offset: int
    payload_bytes: int

    @property
    def record_bytes(self) -> int:
        """Header, payload and filling."""
        return record_bytes(self.payload_bytes)

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.record_bytes


class Header(NamedTuple):
    """What a header that is whole says."""

    key: bytes
    identity: bytes
    namespace: bytes
    place: Place
    check: bytes
    """Of identity and payload, as :func:`page_check` makes it."""


def filling(payload_bytes: int) -> int:
    """Bytes from a payload's end to the end of its last block."""
    return -payload_bytes % BLOCK_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Of a page's header, payload and filling."""
    return BLOCK_BYTES - payload_bytes // -BLOCK_BYTES * BLOCK_BYTES


def identity(namespace: bytes, key: bytes) -> bytes:
    """What the index knows a page by. Two pages that share one by chance are told apart by their headers."""
    return xxhash.xxh3_128_digest(namespace + key)


def identities(namespace: bytes, keys: Iterable[str]) -> list[bytes]:
    """:func:`identity` of many keys."""
    digest = xxhash.xxh3_128_digest
    return [digest(namespace + key.encode()) for key in keys]


def payload_digest(buffers: Iterable[memoryview]) -> bytes:
    """The hash of a payload alone: 16 bytes. Releases the interpreter lock."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def page_check(namespace: bytes, key: bytes, digest: bytes) -> bytes:
    """The checksum of a page: 16 bytes over namespace, key and the payload's digest.

    The payload is hashed by itself, so that it is from the start of its own memory: aligned, a fifth faster.
    """
    return xxhash.xxh3_128_digest(namespace + len(key).to_bytes(4, "little") + key + digest)


def pack(header: Header) -> bytes:
    """The header's block.

    Raises:
        ValueError: the key is longer than :data:`KEY_BYTES`.
    """
    if len(header.key) > KEY_BYTES:
        raise ValueError(f"a key has at most {KEY_BYTES} bytes, not {len(header.key)}")
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, len(header.key), *header.place, header.identity, header.check, header.namespace
    )
    body = (fields + header.key).ljust(_CHECK_AT, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def unpack(block: bytes | memoryview) -> Header | None:
    """What a block says as a header; None if it is none, or a damaged one."""
    if block[:8] != _MAGIC or not _is_whole(block):
        return None
    _, version, key_bytes, segment, offset, payload_bytes, name, check, namespace = _FIELDS.unpack_from(block)
    if version != _VERSION or key_bytes > KEY_BYTES:
        return None
    key = bytes(block[_FIELDS.size : _FIELDS.size + key_bytes])
    return Header(key, name, namespace, Place(segment, offset, payload_bytes), check)


def check_in(block: memoryview, namespace: bytes, key: bytes, place: Place) -> bytes | None:
    """The page's checksum, if the block is this page's header, and whole; else None."""
    if not _is_whole(block):
        return None
    *head, _, check, owner = _FIELDS.unpack_from(block)
    if head != [_MAGIC, _VERSION, len(key), *place] or owner != namespace:
        return None
    return check if block[_FIELDS.size : _FIELDS.size + len(key)] == key else None


def _is_whole(block: bytes | memoryview) -> bool:
    return xxhash.xxh3_128_digest(block[:_CHECK_AT]) == block[_CHECK_AT:]


def is_hole(block: bytes | memoryview) -> bool:
    """Whether the block holds nothing: its page was evicted, or never reached the disk."""
    return bytes(block) == _EMPTY
