import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolgap.store import native


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: these tests force thousands of small files to the disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="toolgap-store-") as folder:
        yield Path(folder)


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to read what is in the page cache: by the compiled part, and where there is no compiler."""
    if request.param == "python":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None
