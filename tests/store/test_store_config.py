import json
import threading
from pathlib import Path

import pytest

from toolgap.store.config import PATH, StoreConfig, arguments, read
from toolgap.store.errors import StoreError
from toolgap.store.options import Fsync, ReadPath
from toolgap.store.stopping import current, stops_when

SETTINGS = StoreConfig(
    path="/disk/kv", limit_bytes=1 << 40, fsync=Fsync.BATCH, read_path=ReadPath.DIRECT, salt="a", weights="b"
)


def test_what_is_written_is_read_back() -> None:
    flags = arguments(SETTINGS, {"prefetch_threshold": 64})
    assert flags[:2] == ["--hicache-storage-backend", "dynamic"]
    extra = json.loads(flags[3])
    assert extra["prefetch_threshold"] == 64
    assert extra["interface_v1"] == 1
    assert read(extra) == (Path("/disk/kv"), SETTINGS)


def test_the_folder_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, "/disk/other")
    assert read({})[0] == Path("/disk/other")
    assert read({"path": "/disk/kv"})[0] == Path("/disk/kv")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "no folder is named"),
        ({"path": "/disk/kv", "limit": 5}, "'limit'"),
        ({"path": "/disk/kv", "fsync": "always"}, "fsync"),
        ({"path": "/disk/kv", "limit_bytes": "many"}, "limit_bytes"),
    ],
)
def test_what_cannot_be_meant_is_named(
    extra: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PATH, raising=False)
    with pytest.raises(StoreError, match=says):
        read(extra)


def test_a_read_is_stopped_for_its_own_thread_alone() -> None:
    stop = threading.Event()
    assert current() is None
    with stops_when(stop.is_set):
        own = current()
        assert own is not None
        assert not own.is_set()
        stop.set()
        assert own.is_set()
        elsewhere: list[threading.Event | None] = []
        thread = threading.Thread(target=lambda: elsewhere.append(current()))
        thread.start()
        thread.join()
        assert elsewhere == [None]
        with stops_when(lambda: False):
            assert current() is not own
        assert current() is own
    assert current() is None
