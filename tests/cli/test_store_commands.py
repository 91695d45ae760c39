"""``toolgap store``: on stores of the test's own; a live server's is in tests/engine."""

import json
import os
from pathlib import Path

import pytest
from command import run, words

from toolgap.store.keys import suffix
from toolgap.store.namespace import Namespace
from toolgap.store.page import Page
from toolgap.store.record import BLOCK_BYTES
from toolgap.store.segments import headers
from toolgap.store.store import Store
from toolgap.terminal import Exit

NAMESPACE = Namespace(
    model="org/some_model",
    weights="w1",
    dtype="bfloat16",
    layout="MHATokenToKVPoolHost layout=page_first dtype=torch.bfloat16 layer_num=2 head_num=1 in-place",
    page_size_tokens=4,
    ranks="tp2 pp1 cp1 dcp1",
)
SIZE = 4800
AS_IS = ("--layout", "page_first")


def page(key: str, fill: int = 1) -> Page:
    return Page(key, [memoryview(bytearray([fill]) * SIZE)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with Store.open(path, NAMESPACE) as store:
        assert all(store.write([page("a"), page("b"), page("c")]))
    return path


def damage_first(path: Path) -> None:
    (segment,) = path.glob("segments/*.seg")
    fd = os.open(segment, os.O_RDWR)
    os.pwrite(fd, b"?", next(headers(segment)).place.offset + BLOCK_BYTES)
    os.close(fd)


def test_stat_tells_whose_pages_they_are(path: Path) -> None:
    result = run("store", "stat", str(path), "--json")
    assert result.exit_code == Exit.OK
    told = json.loads(result.stdout)
    assert told["namespace"]["model"] == "org/some_model"
    assert (told["pages"], told["page_bytes"], told["segments"]) == (3, 3 * SIZE, 1)
    text = words(run("store", "stat", str(path)).stdout)
    assert "weights w1" in text
    assert "pages 3 of 14,400 bytes" in text


def test_verify_ends_with_1_once_for_a_damaged_page(path: Path) -> None:
    assert run("store", "verify", str(path)).exit_code == Exit.OK
    damage_first(path)
    result = run("store", "verify", str(path), "--json")
    assert result.exit_code == Exit.FAILED
    told = json.loads(result.stdout)
    assert (told["checked_pages"], told["damaged_pages"], told["failures"]) == (3, 1, {"checksum": 1})
    again = run("store", "verify", str(path))
    assert again.exit_code == Exit.OK
    assert "2 pages of 9,600 bytes checked" in words(again.stdout)


def test_gc_frees_what_was_set_aside_and_evicts_to_a_limit(path: Path) -> None:
    damage_first(path)
    run("store", "verify", str(path))
    told = json.loads(run("store", "gc", str(path), "--json").stdout)
    assert (told["aside_pages"], told["evicted_pages"]) == (1, 0)
    result = run("store", "gc", str(path), "--limit-gib", "0")
    assert result.exit_code == Exit.OK
    assert "2 evicted pages freed" in words(result.stdout)


@pytest.mark.parametrize("command", ["stat", "verify", "gc"])
def test_what_is_no_store_is_refused(tmp_path: Path, command: str) -> None:
    result = run("store", command, str(tmp_path))
    assert result.exit_code == Exit.USAGE
    assert "holds no store" in words(result.stderr)
    assert not list(tmp_path.glob("segments"))


def stock_files(folder: Path) -> list[str]:
    folder.mkdir()
    hashes = [f"{number:064x}" for number in range(3)]
    for number, name in enumerate(hashes):
        for rank in range(2):
            content = bytes([10 * rank + number + 1]) * SIZE
            (folder / f"{name}_org-some_model_{rank}_2.bin").write_bytes(content)
    (folder / f"{9:064x}_org-some_model_0_4.bin").write_bytes(bytes(SIZE))
    (folder / f"{9:064x}_another_0_2.bin").write_bytes(bytes(SIZE))
    (folder / f"{9:064x}.mamba_org-some_model_0_2.bin").write_bytes(bytes(SIZE))
    (folder / f"{8:064x}_org-some_model_0_2.bin").write_bytes(bytes(17))
    (folder / ".0123.tmp").write_bytes(bytes(SIZE))
    return hashes


def test_import_takes_the_pages_of_this_model_and_shape(path: Path, tmp_path: Path) -> None:
    hashes = stock_files(tmp_path / "stock")
    result = run("store", "import", str(path), str(tmp_path / "stock"), *AS_IS, "--vouch", "--json")
    assert result.exit_code == Exit.OK
    told = json.loads(result.stdout)
    assert {name: count for name, count in told.items() if count} == {
        "imported_pages": 6,
        "foreign_files": 3,
        "odd_files": 1,
    }
    with Store.open(path) as store:
        for rank in range(2):
            key = hashes[1] + suffix("kv", NAMESPACE.layout, tensor=rank)
            blank = page(key, 0)
            assert store.read([blank]) == [True]
            assert bytes(blank.buffers[0]) == bytes([10 * rank + 2]) * SIZE
    again = run("store", "import", str(path), str(tmp_path / "stock"), *AS_IS, "--vouch")
    assert "0 pages imported, 6 were there already" in words(again.stdout)


def test_import_needs_somebody_who_vouches(path: Path, tmp_path: Path) -> None:
    stock_files(tmp_path / "stock")
    result = run("store", "import", str(path), str(tmp_path / "stock"), *AS_IS)
    assert result.exit_code == Exit.USAGE
    assert "do not tell their weights" in words(result.stderr)
    assert "w1, bfloat16 and 4 tokens" in words(result.stderr)
    with Store.open(path) as store:
        assert store.stats().pages == 3


def test_import_refuses_shapes_whose_files_it_does_not_know(tmp_path: Path) -> None:
    import msgspec

    other = msgspec.structs.replace(NAMESPACE, ranks="tp2 pp2 cp1 dcp1")
    with Store.open(tmp_path / "store", other):
        pass
    (tmp_path / "stock").mkdir()
    result = run("store", "import", str(tmp_path / "store"), str(tmp_path / "stock"), *AS_IS, "--vouch")
    assert result.exit_code == Exit.USAGE
    assert "tensor parallelism alone" in words(result.stderr)
    missing = run("store", "import", str(tmp_path / "store"), str(tmp_path / "none"), *AS_IS, "--vouch")
    assert missing.exit_code == Exit.USAGE


def test_pages_of_another_layout_are_turned(path: Path, tmp_path: Path) -> None:
    (tmp_path / "stock").mkdir()
    rows = [
        bytes([16 * plane + 4 * layer + token]) * 300
        for plane in range(2)
        for layer in range(2)
        for token in range(4)
    ]
    (tmp_path / "stock" / f"{1:064x}_org-some_model_0_2.bin").write_bytes(b"".join(rows))
    result = run("store", "import", str(path), str(tmp_path / "stock"), "--layout", "layer_first", "--vouch")
    assert "1 pages imported" in words(result.stdout)
    blank = page(f"{1:064x}" + suffix("kv", NAMESPACE.layout, tensor=0), 0)
    with Store.open(path) as store:
        assert store.read([blank]) == [True]
    expected = [
        16 * plane + 4 * layer + token for plane in range(2) for token in range(4) for layer in range(2)
    ]
    assert list(bytes(blank.buffers[0])[::300]) == expected


def test_import_refuses_pages_whose_order_it_does_not_know(tmp_path: Path) -> None:
    import msgspec

    (tmp_path / "stock").mkdir()
    for number, layout in enumerate(
        ["Other layout=page_first layer_num=2", NAMESPACE.layout.replace("page_first", "layer_first")]
    ):
        other = msgspec.structs.replace(NAMESPACE, layout=layout)
        with Store.open(tmp_path / f"{number}", other):
            pass
        result = run(
            "store", "import", str(tmp_path / f"{number}"), str(tmp_path / "stock"), *AS_IS, "--vouch"
        )
        assert result.exit_code == Exit.USAGE
        assert "cannot be imported" in words(result.stderr) or "piece by piece" in words(result.stderr)


def test_what_is_missing_from_the_environment_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolgap.cli.store.find_spec", lambda name: None)
    result = run("store", "stat", str(path))
    assert result.exit_code == Exit.USAGE
    assert "pip install 'toolgap[store]'" in words(result.stderr)
