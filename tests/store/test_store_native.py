"""The compiled part of the store: it reads and hashes as Python does, and the store works where it cannot be had."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import NAMESPACE, pages, read_right

from toolgap.store import native
from toolgap.store.native import compiler, stripreader
from toolgap.store.native.compiler import CompilerError, compiled
from toolgap.store.native.stripreader import SOURCE, StripReader
from toolgap.store.options import Options, ReadPath
from toolgap.store.store import Store

pytestmark = pytest.mark.slow

CONTENT = os.urandom(5000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled libraries; the folder in it that will hold them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "toolgap" / "native"


@pytest.fixture
def anew() -> Iterator[None]:
    """Whether there is a compiler is asked again, in the test and after it."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    compile_ = shutil.which("cc")
    assert compile_ is not None
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-O2"]
    subprocess.run(
        [compile_, *strict, "-shared", "-fPIC", "-o", str(tmp_path / "x.so"), str(SOURCE)], check=True
    )


@settings(max_examples=200, deadline=None)
@given(
    laid=st.lists(
        st.tuples(st.integers(1, 300), st.lists(st.integers(1, 400), min_size=1, max_size=4)),
        min_size=1,
        max_size=40,
    ),
    piece=st.integers(1, 2000),
    offset=st.integers(0, len(CONTENT) + 10),
)
def test_any_parts_are_read_and_hashed_as_by_python(
    laid: list[tuple[int, list[int]]], piece: int, offset: int
) -> None:
    """Pages of some parts each, and before each something that is nobody's."""
    parts, owners, payloads, at = [], [], [], offset
    for page, (other, own) in enumerate(laid, 1):
        parts += [memoryview(bytearray(size)) for size in (other, *own)]
        owners += [0] + [page] * len(own)
        payloads.append(slice(at + other, at + other + sum(own)))
        at += other + sum(own)
    fd = os.memfd_create("content")
    try:
        os.write(fd, CONTENT)
        read, digests = StripReader().read(fd, offset, parts, owners, len(laid), piece_bytes=piece)
    finally:
        os.close(fd)
    there = CONTENT[offset:at]
    assert read == len(there)
    assert b"".join(parts)[:read] == there
    whole = [page for page, payload in enumerate(payloads) if payload.stop <= len(CONTENT)]
    assert [digests[page] for page in whole] == [
        xxhash.xxh3_128_digest(CONTENT[payloads[page]]) for page in whole
    ]


def test_what_the_system_says_is_raised() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)) as caught:
        StripReader().read(-1, 0, [memoryview(bytearray(8))], [1], 1, 64)
    assert caught.value.errno == errno.EBADF


def test_memory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="not writable"):
        StripReader().read(0, 0, [memoryview(b"constant")], [1], 1, 64)


def test_it_is_compiled_once(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        compiled(SOURCE)
    finally:
        os.umask(before)
    (library,) = cache.iterdir()
    with mock.patch("subprocess.run", side_effect=AssertionError("compiled again")):
        compiled(SOURCE)
    assert list(cache.iterdir()) == [library]


def test_a_library_of_another_system_is_made_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(SOURCE)
    (right,) = cache.iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    library = tmp_path / "other" / "toolgap" / "native" / right.name
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF of something else")
    compiled(SOURCE)
    assert library.stat().st_size == right.stat().st_size


@pytest.mark.parametrize("what", ["folder", "library"])
def test_what_others_can_write_is_not_loaded(cache: Path, what: str) -> None:
    compiled(SOURCE)
    (library,) = cache.iterdir()
    (cache if what == "folder" else library).chmod(0o777)
    with mock.patch("subprocess.run", wraps=subprocess.run) as run:
        compiled(SOURCE)
    assert run.call_count == 1


def test_without_a_folder_for_it_it_is_compiled_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert StripReader()
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_without_any_folder_it_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(CompilerError, match="no place for what is compiled"):
        compiled(SOURCE)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "there is no C compiler"),
        ("echo 'x.c:1: error: no' >&2; exit 1", "error: no"),
        ("exit 3", "it says nothing"),
        ('while [ "$1" != -o ]; do shift; done; echo nothing > "$2"', "cannot be loaded"),
    ],
)
def test_why_it_was_not_compiled_is_said(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, message: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CC", raising=False)
    if script is not None:
        (tools / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "cc").chmod(0o755)
    with pytest.raises(CompilerError, match=message):
        compiled(SOURCE)


def test_a_compiler_that_hangs_is_given_up(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "cc"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("CC", str(hanging))
    monkeypatch.setattr(compiler, "_TIMEOUT_S", 0.1)
    with pytest.raises(CompilerError, match="does not end"):
        compiled(SOURCE)
    assert not list(cache.iterdir())


def test_a_library_that_hashes_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("createState", "freeState", "64bits_reset", "64bits_update", "64bits_digest")
    monkeypatch.setattr(stripreader, "_FUNCTIONS", wrong)
    with pytest.raises(CompilerError, match="does not do what it should"):
        StripReader()
    monkeypatch.setattr(stripreader, "_FUNCTIONS", ("nothing",))
    with pytest.raises(CompilerError, match="no XXH3_nothing"):
        StripReader()


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_the_store_reads_all_the_same(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    caplog.set_level(logging.WARNING)
    with Store.open(tmp_path / "kv", NAMESPACE, Options(read_path=ReadPath.CACHED)) as store:
        assert all(store.write(pages(["a", "b"])))
        assert all(read_right(store, ["a", "b"]))
        assert all(read_right(store, ["b"]))
    (record,) = caplog.records
    assert "there is no C compiler (cc)" in record.getMessage()
