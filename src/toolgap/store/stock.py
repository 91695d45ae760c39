"""Pages from the folder of SGLang's own file backend.

Its files hold a page's bytes and nothing else. Their names tell the page's hash, the model's name and the rank;
weights, dtype, layout and page size are told nowhere: whoever imports them says the layout, and vouches for the rest.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from toolgap.store.batches import batches
from toolgap.store.errors import StoreError
from toolgap.store.keys import suffix
from toolgap.store.namespace import Namespace
from toolgap.store.page import Page
from toolgap.store.stockpages import Layout, PageForm
from toolgap.store.store import Store

_HASH = re.compile(r"[0-9a-f]{64}")
_RANKS = re.compile(r"tp(\d+) pp1 cp1 dcp1")


class Imported(msgspec.Struct, kw_only=True):
    """What became of the files."""

    imported_pages: int = 0
    held_pages: int = 0
    """That the store had already."""
    failed_pages: int = 0
    """That could not be read or written."""
    foreign_files: int = 0
    """Of another model, parallel shape or pool, or no pages."""
    odd_files: int = 0
    """Of another size than most: no whole pages, or pages of another form."""


class _Found(NamedTuple):
    path: Path
    key: str
    size_bytes: int


def import_folder(
    store: Store, folder: Path, layout: Layout, progress: Callable[[int, int], None] | None = None
) -> Imported:
    """Write the pages of a file backend's folder into a store; those written last are the last to be evicted.

    Args:
        store: Where to.
        folder: Where from; its files stay.
        layout: That of the server that wrote them.
        progress: Called with the bytes that are done, and those there are in all.

    Raises:
        StoreError: the folder cannot be read, or the store's pages or parallel shape are such that files of them are
            not known.
    """
    keys, form = _Keys(store.namespace), PageForm.of(store.namespace)
    imported = Imported()
    try:
        files = [(path.stat(), path) for path in folder.iterdir() if path.suffix == ".bin"]
    except OSError as error:
        raise StoreError(f"{folder} cannot be read: {error.strerror or error}") from None
    files.sort(key=lambda file: file[0].st_mtime_ns)
    pages: list[_Found] = []
    for state, path in files:
        key = keys.of(path.stem)
        if key is None:
            imported.foreign_files += 1
        else:
            pages.append(_Found(path, key, state.st_size))
    usual = Counter(page.size_bytes for page in pages).most_common(1)
    whole = [page for page in pages if page.size_bytes == usual[0][0]]
    imported.odd_files = len(pages) - len(whole)
    total, done = sum(page.size_bytes for page in whole), 0
    for batch in batches(whole, lambda page: page.size_bytes):
        _import(store, batch, form, layout, imported)
        done += sum(page.size_bytes for page in batch)
        if progress is not None:
            progress(done, total)
    return imported


def _import(store: Store, batch: list[_Found], form: PageForm, layout: Layout, imported: Imported) -> None:
    held = store.exists([page.key for page in batch])
    imported.held_pages += sum(held)
    pages: list[Page] = []
    for found, is_held in zip(batch, held, strict=True):
        if is_held:
            continue
        try:
            content = bytearray(found.path.read_bytes())
        except OSError:
            content = bytearray()
        if len(content) != found.size_bytes:
            imported.failed_pages += 1
            continue
        try:
            page = form.from_layout(layout, content)
        except ValueError:
            imported.odd_files += 1
        else:
            pages.append(Page(found.key, [memoryview(page)]))
    written = store.write(pages)
    imported.imported_pages += sum(written)
    imported.failed_pages += written.count(False)


class _Keys:
    """The keys of a namespace's pages, from the names of the file backend."""

    def __init__(self, namespace: Namespace) -> None:
        shape = _RANKS.fullmatch(namespace.ranks)
        if shape is None:
            raise StoreError(
                f"files of the shape {namespace.ranks!r} cannot be imported: tensor parallelism alone can"
            )
        ranks = int(shape[1])
        model = namespace.model.replace("/", "-")
        self._suffixes: dict[str, str] = {
            f"_{model}_{rank}_{ranks}": suffix("kv", namespace.layout, tensor=rank) for rank in range(ranks)
        }
        # Of latent attention: all ranks share one file.
        self._suffixes[f"_{model}"] = suffix("kv", namespace.layout, tensor="all")

    def of(self, stem: str) -> str | None:
        """The key of a file's page; None if it is no page of this namespace's KV."""
        name, tail = stem[:64], stem[64:]
        own = self._suffixes.get(tail)
        return name + own if own is not None and _HASH.fullmatch(name) else None
