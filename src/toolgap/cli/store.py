"""The commands ``toolgap store ...``: what is in a store, whether it is right, and its space."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from toolgap.store.stockpages import Layout
from toolgap.terminal import Exit, Json, fail, guarded, print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from toolgap.store.store import Store

app = typer.Typer(
    name="store",
    help="Look after a store: the L3 of toolgap serve --store.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The store's folder.", show_default=False)]
GIB = 1 << 30


@contextmanager
def _opened(path: Path) -> Iterator["Store"]:
    """The store there; what keeps it from being used ends the command with a sentence."""
    if find_spec("xxhash") is None:
        fail(Exit.USAGE, "xxhash is missing: pip install 'toolgap[store]'")
    from toolgap.store.errors import StoreError
    from toolgap.store.store import Store

    try:
        with Store.open(path) as store:
            yield store
    except StoreError as error:
        fail(Exit.USAGE, str(error))


@contextmanager
def _progress(what: str) -> Iterator["Callable[[int, int], None]"]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # On stderr, and gone at the end: stdout is for the result.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@app.callback()
def store() -> None:
    """Look after a store: the L3 of toolgap serve --store."""


@app.command()
@guarded
def stat(path: Folder, as_json: Json = False) -> None:
    """Show whose pages a store holds, how many, and the space they take."""
    from toolgap.store import recovery
    from toolgap.store.segments import segments

    with _opened(path) as opened:
        stats, namespace = opened.stats(), opened.namespace
        files = len(segments(path))
        taken_bytes = recovery.taken_bytes(path)
    if as_json:
        print_json(
            {
                "namespace": namespace,
                "pages": stats.pages,
                "page_bytes": stats.page_bytes,
                "used_bytes": stats.used_bytes,
                "aside_pages": stats.aside_pages,
                "segments": files,
                "disk_bytes": taken_bytes,
                "writable": stats.writable,
            }
        )
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in msgspec.structs.asdict(namespace).items():
        table.add_row(name.replace("_", " "), str(value))
    table.add_row("pages", f"{stats.pages:,} of {stats.page_bytes:,} bytes")
    table.add_row("set aside", f"{stats.aside_pages:,}, damaged; toolgap store gc frees them")
    table.add_row("on disk", f"{taken_bytes:,} bytes in {files} segments")
    table.add_row("writable", "yes" if stats.writable else "no")
    Console(highlight=False).print(table)


@app.command()
@guarded
def verify(path: Folder, as_json: Json = False) -> None:
    """Read every page and check it; a damaged one is set aside and is a miss from then on.

    Servers may use the store meanwhile. Exit status 1: a page is damaged, or could not be read.
    """
    with _opened(path) as opened, _progress("Checking") as progress:
        verified = opened.verify(progress)
        failures = opened.stats().failures
    if as_json:
        print_json({**msgspec.structs.asdict(verified), "failures": failures})
    else:
        say(f"{verified.checked_pages:,} pages of {verified.checked_bytes:,} bytes checked")
        say(f"{verified.damaged_pages:,} damaged, {verified.unread_pages:,} not read")
        for reason, pages in failures.items():
            say(f"  {reason}: {pages:,}")
    if verified.damaged_pages or verified.unread_pages:
        raise typer.Exit(Exit.FAILED)


@app.command()
@guarded
def gc(
    path: Folder,
    limit_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="GIB",
            help="Also evict the least recently used down to this.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Give back the space of damaged pages, and of what killed servers left.

    Whole pages that a killed server had not told of become pages again. Servers may use the store meanwhile.
    """
    with _opened(path) as opened:
        collected = opened.gc(None if limit_gib is None else int(limit_gib * GIB))
    if as_json:
        print_json(collected)
        return
    say(f"{collected.freed_bytes:,} bytes given back")
    say(
        f"{collected.aside_pages:,} damaged and {collected.evicted_pages:,} evicted pages freed, "
        f"{collected.adopted_pages:,} forgotten pages found again"
    )


@app.command("import")
@guarded
def import_(
    path: Folder,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder of SGLang's file backend.", show_default=False),
    ],
    layout: Annotated[
        Layout,
        typer.Option(
            help="The --hicache-mem-layout of the server that wrote the files; layer_first if it had none.",
            show_default=False,
        ),
    ],
    vouch: Annotated[
        bool,
        typer.Option(
            "--vouch",
            help="The files were written with the weights, KV dtype and page size that the store names.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Take over the pages of SGLang's file backend.

    The store must be there: start the server once with --store. The files' names tell the model and the rank, which
    are checked; for what they do not tell, --vouch is needed.
    """
    with _opened(path) as opened:
        namespace = opened.namespace
        if not vouch:
            fail(
                Exit.USAGE,
                f"files of SGLang's file backend do not tell their weights, KV dtype and page size. If they are "
                f"{namespace.weights}, {namespace.dtype} and {namespace.page_size_tokens} tokens, say --vouch; if "
                "not, the server would give wrong answers from them",
            )
        from toolgap.store.stock import import_folder

        with _progress("Importing") as progress:
            imported = import_folder(opened, folder, layout, progress)
        failures = opened.stats().failures
    if as_json:
        print_json({**msgspec.structs.asdict(imported), "failures": failures})
    else:
        say(f"{imported.imported_pages:,} pages imported, {imported.held_pages:,} were there already")
        say(
            f"{imported.foreign_files:,} files of other models, shapes or pools and {imported.odd_files:,} of "
            f"another size left out, {imported.failed_pages:,} failed"
        )
        for reason, pages in failures.items():
            say(f"  {reason}: {pages:,}")
    if imported.failed_pages:
        raise typer.Exit(Exit.FAILED)
