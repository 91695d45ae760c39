"""What the doctor says of Toolgap's store."""

from pathlib import Path

from toolgap.doctor.arguments import check_arguments
from toolgap.doctor.findings import Finding, Level
from toolgap.doctor.store import StorePlace, check_store, inspect_store
from toolgap.store.config import StoreConfig
from toolgap.store.config import arguments as store_arguments


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_a_store_is_found_in_sglangs_arguments(tmp_path: Path) -> None:
    config = StoreConfig(path=str(tmp_path / "kv"), limit_bytes=1 << 30)
    found = check_arguments(["--enable-hierarchical-cache", *store_arguments(config)])
    (store,) = [finding for finding in found if finding.name == "store"]
    assert store.level == Level.OK
    assert "at most 1.0 GiB" in store.meaning
    assert "store-limit" not in levels(found)
    assert inspect_store('{"class_name": "Another"}') is None
    unknown = check_arguments(["--hicache-storage-backend-extra-config", '{"class_name": "ToolgapStore"}'])
    assert "no folder is named" in unknown[0].meaning


def test_what_a_store_lacks() -> None:
    place = StorePlace(
        Path("/disk/kv"), None, reads_in_place=False, has_xxhash=False, has_compiler=False, free_bytes=None
    )
    found = levels(check_store(place))
    assert found == {
        "store-packages": Level.PROBLEM,
        "store-compiler": Level.NOTE,
        "store-interface": Level.NOTE,
        "store": Level.PROBLEM,
    }
    whole = place._replace(has_xxhash=True, has_compiler=True, free_bytes=1 << 40, reads_in_place=True)
    assert levels(check_store(whole)) == {
        "store": Level.OK,
        "store-limit": Level.NOTE,
    }
