from pathlib import Path

import pytest

from toolgap.demo import tool
from toolgap.demo.errors import DemoError
from toolgap.demo.tool import OTHERS, TEST_MODULE, VENDORED, Repository, library_source, library_text


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.create(tmp_path / "repository")


def test_the_tests_really_run(repository: Repository) -> None:
    output = repository.run_tests(TEST_MODULE)
    assert "Ran 2 tests" in output
    assert output.endswith("OK")


def test_equal_runs_give_equal_output(repository: Repository, tmp_path: Path) -> None:
    other = Repository.create(tmp_path / "elsewhere" / "repository")
    assert repository.run_tests(TEST_MODULE) == other.run_tests(TEST_MODULE)


def test_the_output_depends_on_the_code(repository: Repository) -> None:
    (repository.folder / "vendored" / "textwrap.py").write_text("def wrap(text, width):\n    return [text]\n")
    output = repository.run_tests(TEST_MODULE)
    assert "FAIL: test_split" in output
    assert "FAIL: test_join" not in output
    assert output.endswith("FAILED (failures=1)")


def test_files_are_really_read(repository: Repository) -> None:
    path, lines = repository.files()[0]
    text = library_source(VENDORED[0]).read_text(encoding="utf-8")
    assert repository.read_file(path, lines) == text.rstrip("\n")
    assert repository.read_file(path, 2) == "\n".join(text.splitlines()[:2])
    assert [name for name, _ in repository.files()] == [f"vendored/{module}.py" for module in VENDORED]


def test_a_test_run_that_hangs_ends_the_demo(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "TEST_TIMEOUT_S", 0.0)
    with pytest.raises(DemoError, match="took over"):
        repository.run_tests(TEST_MODULE)


def test_without_chance_keeps_everything_else(tmp_path: Path) -> None:
    output = f'..\n  File "{tmp_path}/test_wrap.py", line 1\nRan 2 tests in 0.001s\n\nOK\n'
    assert tool.without_chance(output, tmp_path) == '..\n  File "test_wrap.py", line 1\nRan 2 tests\n\nOK'


def test_a_python_without_sources_is_named() -> None:
    with pytest.raises(DemoError, match="standard library"):
        library_source("sys")


def test_other_agents_read_other_modules() -> None:
    assert not set(OTHERS) & set(VENDORED)
    assert len(library_text(OTHERS)) > 100_000
