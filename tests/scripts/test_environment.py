import fcntl
import json
import os
import shutil
import sys
from itertools import combinations
from pathlib import Path

import pytest

import environment


def finished(folder: Path, name: str) -> Path:
    """A dependency environment as a build leaves it, without its gigabytes."""
    path = folder / name
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    environment.write_record(path / environment.DEPENDENCY_RECORD, {"layout": 1})
    return path


OLD, NEW, OTHER = "0123456789abcdef", "fedcba9876543210", "00000000deadbeef"


# What decides between using an environment and building another


def test_key_depends_on_every_pin() -> None:
    one = environment.environment_key("a==1\nb==2\n", "cpython-311")
    assert one != environment.environment_key("a==1\nb==3\n", "cpython-311")
    assert one != environment.environment_key("a==1\n", "cpython-311")


def test_key_ignores_comments_blank_lines_and_order() -> None:
    one = environment.environment_key("a==1\nb==2\n", "cpython-311")
    assert one == environment.environment_key("# why\n\nb==2  # two\na==1\n", "cpython-311")


def test_key_depends_on_interpreter_and_layout() -> None:
    one = environment.environment_key("a==1\n", "cpython-311", 1)
    assert one != environment.environment_key("a==1\n", "cpython-312", 1)
    assert one != environment.environment_key("a==1\n", "cpython-311", 2)


def test_key_is_a_name_that_removal_knows(tmp_path: Path) -> None:
    path = finished(tmp_path, environment.environment_key("a==1\n", "cpython-311"))
    assert environment.removable(tmp_path, tmp_path / NEW, frozenset()) == [path]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "/home/a/.cache/toolgap/env"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/toolgap/env"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/a/.cache/toolgap/env"),
        ({"XDG_CACHE_HOME": ""}, "/home/a/.cache/toolgap/env"),
        ({"XDG_CACHE_HOME": "/cache", "TOOLGAP_ENV_DIR": "/big/env"}, "/big/env"),
        ({"TOOLGAP_ENV_DIR": ""}, "/home/a/.cache/toolgap/env"),
    ],
)
def test_folder(variables: dict[str, str], expected: str) -> None:
    assert environment.environments_folder(variables, Path("/home/a")) == Path(expected)


def test_kinds_share_nothing() -> None:
    kinds = (environment.ENGINE, environment.AGENTS, environment.DEPLOY)
    for one, other in combinations(kinds, 2):
        assert one.lock != other.lock
        assert one.venv != other.venv
        assert one.subfolder != other.subfolder


def test_a_kinds_folder_is_no_name_that_removal_knows(tmp_path: Path) -> None:
    for kind in (environment.AGENTS, environment.DEPLOY):
        (tmp_path / kind.subfolder).mkdir()
    assert environment.removable(tmp_path, tmp_path / NEW, frozenset()) == []


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [([], environment.ENGINE), (["--agents"], environment.AGENTS), (["--deploy"], environment.DEPLOY)],
)
def test_kind_is_made_only_when_asked_for(arguments: list[str], kind: environment.Kind) -> None:
    assert environment.kind_asked_for(arguments) is kind


def test_other_arguments_are_a_problem() -> None:
    with pytest.raises(environment.ProblemError, match="--agent\n"):
        environment.kind_asked_for(["--agent"])


# Complete, unfinished, damaged


def test_finished_environment_is_complete(tmp_path: Path) -> None:
    assert environment.is_complete(finished(tmp_path, OLD))


def test_environment_without_its_record_is_unfinished(tmp_path: Path) -> None:
    path = finished(tmp_path, OLD)
    (path / environment.DEPENDENCY_RECORD).unlink()
    assert not environment.is_complete(path)


def test_record_that_was_not_put_in_place_does_not_count(tmp_path: Path) -> None:
    path = finished(tmp_path, OLD)
    record = path / environment.DEPENDENCY_RECORD
    record.rename(record.with_suffix(".new"))
    assert not environment.is_complete(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\udcff"])
def test_damaged_record_counts_as_none(tmp_path: Path, content: str) -> None:
    path = finished(tmp_path, OLD)
    damaged = content.encode("utf-8", "surrogateescape")
    (path / environment.DEPENDENCY_RECORD).write_bytes(damaged)
    assert not environment.is_complete(path)


def test_environment_whose_interpreter_has_gone_is_unfinished(tmp_path: Path) -> None:
    path = finished(tmp_path, OLD)
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").symlink_to(tmp_path / "removed" / "python3.11")
    assert not environment.is_complete(path)


def test_record_survives_the_round_trip(tmp_path: Path) -> None:
    environment.write_record(tmp_path / "record.json", {"a": [1, "b"]})
    assert environment.read_record(tmp_path / "record.json") == {"a": [1, "b"]}
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_clone_record_changes_with_all_it_depends_on(tmp_path: Path) -> None:
    records = [
        environment.clone_record(tmp_path / OLD, tmp_path, b"one"),
        environment.clone_record(tmp_path / NEW, tmp_path, b"one"),
        environment.clone_record(tmp_path / OLD, tmp_path / "moved", b"one"),
        environment.clone_record(tmp_path / OLD, tmp_path, b"two"),
    ]
    assert len({json.dumps(record) for record in records}) == len(records)


# Which environments go


def test_every_other_environment_goes(tmp_path: Path) -> None:
    keep, old, other = (finished(tmp_path, name) for name in (NEW, OLD, OTHER))
    assert environment.removable(tmp_path, keep, frozenset()) == [other, old]


def test_unfinished_leftovers_go_too(tmp_path: Path) -> None:
    (tmp_path / OLD / "bin").mkdir(parents=True)
    keep = finished(tmp_path, NEW)
    assert environment.removable(tmp_path, keep, frozenset()) == [tmp_path / OLD]


def test_environment_that_a_process_uses_stays(tmp_path: Path) -> None:
    keep, old = finished(tmp_path, NEW), finished(tmp_path, OLD)
    mapped = frozenset({f"{old}/lib/python3.11/site-packages/torch/lib/libc10.so"})
    assert environment.removable(tmp_path, keep, mapped) == []


def test_only_what_has_an_environments_name_goes(tmp_path: Path) -> None:
    keep = finished(tmp_path, NEW)
    (tmp_path / "lock").touch()
    (tmp_path / f"{OLD}.log").touch()
    (tmp_path / OTHER).touch()
    (tmp_path / "photographs").mkdir()
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (tmp_path / OLD).symlink_to(outside)
    assert environment.removable(tmp_path, keep, frozenset()) == []


def test_removal_leaves_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "mapped_files", frozenset)
    keep = finished(tmp_path, NEW)
    finished(tmp_path, OLD)
    (tmp_path / f"{OLD}.log").touch()
    environment.remove_old(tmp_path, keep)
    assert list(tmp_path.iterdir()) == [keep]


def test_kinds_do_not_remove_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "mapped_files", frozenset)
    folders = [tmp_path / kind.subfolder for kind in (environment.ENGINE, environment.AGENTS)]
    engine, agents = (finished(folder, NEW) for folder in folders)
    for folder, keep in zip(folders, (engine, agents), strict=True):
        finished(folder, OLD)
        environment.remove_old(folder, keep)
    assert environment.is_complete(engine)
    assert environment.is_complete(agents)
    assert not list(tmp_path.rglob(OLD))


def test_mapped_files_are_read_from_every_process(tmp_path: Path) -> None:
    for process, line in {"12": "/env/a b.so", "7": "[heap]", "self": "/env/not-a-process"}.items():
        (tmp_path / process).mkdir()
        maps = f"7f0-7f1 r-xp 00000000 08:01 42   {line}\n7f2-7f3 rw-p 00000000 00:00 0\n"
        (tmp_path / process / "maps").write_text(maps)
    (tmp_path / "13").mkdir()
    assert environment.mapped_files(tmp_path) == {"/env/a b.so", "[heap]"}


def test_this_process_is_among_those_looked_at() -> None:
    assert any("libc.so" in name for name in environment.mapped_files())


# The rest


def test_too_little_space_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_gib", lambda path: 3.0)
    with pytest.raises(environment.ProblemError, match=r"has 3\.0 GiB free.*\n.*TOOLGAP_ENV_DIR"):
        environment.require_space(environment.ENGINE, tmp_path, tmp_path / NEW)


def test_an_old_environment_makes_room_for_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = finished(tmp_path, OLD)
    monkeypatch.setattr(environment, "mapped_files", frozenset)
    monkeypatch.setattr(environment, "free_gib", lambda path: 3.0 if old.exists() else 10.0)
    environment.require_space(environment.ENGINE, tmp_path, tmp_path / NEW)
    assert not old.exists()


def test_free_space_of_a_folder_to_come(tmp_path: Path) -> None:
    assert environment.free_gib(tmp_path / "a" / "b") > 0


def test_size_counts_a_hard_link_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 100_000)
    size = environment.tree_gib(tmp_path)
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert environment.tree_gib(tmp_path) == size > 0


def test_missing_tools_are_named_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    tools = [environment.Tool("g++", "g++"), environment.Tool("the headers", "libssl-dev")]
    with pytest.raises(environment.ProblemError, match="apt-get install g\\+\\+ libssl-dev"):
        environment.provide(tools)


def test_only_an_engine_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_pip", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert environment.missing_tools(environment.AGENTS) == []
    assert "g++" in {tool.package for tool in environment.missing_tools(environment.ENGINE)}


def test_nothing_missing_is_no_problem() -> None:
    environment.provide([])


def test_lock_is_held_until_a_step_that_inherited_it_ends(tmp_path: Path) -> None:
    with environment.only_one(tmp_path) as lock:
        inherited = os.dup(lock.fileno())
    with (tmp_path / "lock").open() as second:
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(inherited)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_failing_step_shows_its_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failing = [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"]
    with (
        environment.only_one(tmp_path) as lock,
        pytest.raises(environment.ProblemError, match=r"exit 3"),
    ):
        environment.run(failing, tmp_path / "log", lock, {})
    assert "no such package" in capfd.readouterr().out
