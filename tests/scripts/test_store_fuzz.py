"""The script that tries to make a store lose or forge pages, for a moment; evidence/store-faults has longer runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import store_fuzz
from toolgap.store.store import Store

pytestmark = pytest.mark.slow

SCRIPT = Path(store_fuzz.__file__)


def play(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    told: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, told["found"]) == (0, None), done.stdout + done.stderr
    return told


def test_writers_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    told = play("kill", "--times", "8", "--folder", str(tmp_path))
    assert told["kills"] == 16
    assert told["acknowledged_pages"] > 0
    assert not list(tmp_path.iterdir())


def test_random_damage_is_survived(tmp_path: Path) -> None:
    told = play("fuzz", "--rounds", "10", "--folder", str(tmp_path))
    assert told["rounds"] == 10
    assert told["pages read right"] > 0
    assert told["damage"] > 0


def test_an_index_of_many_pages_opens(tmp_path: Path) -> None:
    told = play("open", "--pages", "5000", "--folder", str(tmp_path))
    assert told["pages"] == 5000


def test_a_lost_or_forged_page_would_be_found(tmp_path: Path) -> None:
    with Store.open(tmp_path, store_fuzz.NAMESPACE) as store:
        (page,) = store_fuzz.to_write(["a"])
        forged = page._replace(key="b", buffers=[memoryview(bytearray(store_fuzz.size_of("b")))])
        store.write([page, forged])
        assert store_fuzz.read(store, ["a", "c"]) == [True, False]
        with pytest.raises(store_fuzz.FoundError, match="wrong bytes of b"):
            store_fuzz.read(store, ["b"])
