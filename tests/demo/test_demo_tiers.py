from collections.abc import Sequence
from pathlib import Path

import pytest

from toolgap.demo import tiers as tiers_module
from toolgap.demo.errors import DemoError
from toolgap.demo.tiers import OTHER_PROMPT_TOKENS, ForeignTiers, OwnTiers, StorageFolder
from toolgap.engineclient import Engine, Generation

PAGE = 16


class FakeEngine(Engine):
    """Writes the pages that a real one would, named by namespace and position, into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []

    def generate(
        self, input_ids: Sequence[int], *, max_new_tokens: int, cache_salt: str | None = None
    ) -> Generation:
        self.log.append(f"{cache_salt}: {len(input_ids)}")
        for page in range((len(input_ids) + max_new_tokens - 1) // PAGE):
            (self.folder / f"{cache_salt}-{page}.bin").touch()
        return Generation(0.1, 0.2, len(input_ids), [1] * max_new_tokens, "", 0, 0, 0)

    def flush(self) -> None:
        self.log.append("flush")


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(tmp_path)


def own_tiers(engine: FakeEngine, l2_tokens: int, prompt_tokens: int = 4096) -> OwnTiers:
    storage = StorageFolder(engine.folder)
    return OwnTiers(engine, storage, prompt_tokens=prompt_tokens, page_tokens=PAGE, l2_tokens=l2_tokens)


@pytest.mark.parametrize("l2_tokens", [OTHER_PROMPT_TOKENS - 1, 9232, 4 * OTHER_PROMPT_TOKENS])
@pytest.mark.parametrize("prompt_tokens", [512, 4096])
def test_traffic_is_more_than_l2_holds(engine: FakeEngine, l2_tokens: int, prompt_tokens: int) -> None:
    assert own_tiers(engine, l2_tokens, prompt_tokens).traffic_tokens > l2_tokens


def test_no_other_prompt_is_longer_than_the_prompt(engine: FakeEngine) -> None:
    own_tiers(engine, 1000, prompt_tokens=700).prepare(range(9), lambda *_: None)
    assert engine.log == ["other-agent-0: 700", "other-agent-1: 700"]


def test_other_prompts_differ_and_are_played_again_to_evict(engine: FakeEngine) -> None:
    tiers = own_tiers(engine, 2 * OTHER_PROMPT_TOKENS)
    done: list[int] = []
    tiers.prepare(range(500), lambda number, _: done.append(number))
    assert done == [0, 1, 2]
    computed = engine.log.copy()
    assert len(set(computed)) == 3
    assert tiers.evicted([1, 2, 3]) is None
    assert engine.log == computed * 2


def test_an_arm_leaves_no_page_behind(engine: FakeEngine) -> None:
    tiers = own_tiers(engine, 2 * OTHER_PROMPT_TOKENS)
    prefix = list(range(4 * PAGE + 3))
    tiers.store(prefix)
    tiers.prepare(range(9), lambda *_: None)
    kept = {path.name for path in engine.folder.iterdir()}
    continuation = engine.generate(prefix + [1] * 40, max_new_tokens=8)
    assert {path.name for path in engine.folder.iterdir()} > kept
    tiers.settle(continuation._replace(storage_tokens=4 * PAGE))
    assert {path.name for path in engine.folder.iterdir()} == kept


def test_pages_that_must_be_stored_and_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "BACKUP_DEADLINE_S", -1.0)
    (tmp_path / "page.bin").touch()
    (tmp_path / ".half.tmp").touch()
    with pytest.raises(DemoError, match="has written 1 pages to L3 and not 2"):
        StorageFolder(tmp_path).wait_for(2, required=True)


def test_pages_that_need_not_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "QUIET_S", -1.0)
    StorageFolder(tmp_path).wait_for(2, required=False)


def test_a_foreign_server_is_flushed_after_each_fresh_prefix(engine: FakeEngine) -> None:
    tiers = ForeignTiers(engine)
    salts = [tiers.evicted([1] * 40), tiers.evicted([1] * 40)]
    assert salts[0] != salts[1]
    assert engine.log == [f"{salts[0]}: 40", "flush", f"{salts[1]}: 40", "flush"]
