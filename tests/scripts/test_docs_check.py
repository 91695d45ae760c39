from pathlib import Path

import pytest

import docs_check


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "Makefile").write_text("env: ## Set up\n\ntest-unit: env\n")
    (tmp_path / "docs" / "http.md").write_text("# HTTP\n## `submit`, and why\n## Limits\n## Limits\n")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "[a](docs/http.md) [b](docs/) [c](docs/http.md#submit-and-why)",
        "[d](docs/http.md#limits-1)\n# Here\n[e](#here)",
        "[f](https://example.com/none) [g](mailto:a@example.com)",
        '<img src="docs/http.md"> <a id="x"></a> [h](#x)',
        "[![badge](docs/http.md)](docs/http.md)",
        "`[not](a-link.md)`\n```\n[nor](this.md)\n# nor this\n```\n",
        "Run `make env`, or\n```\n$ make PYTHON=python3.12 test-unit\n```\nmake sure of it\n",
    ],
)
def test_what_exists_passes(root: Path, text: str) -> None:
    (root / "README.md").write_text(text)
    assert docs_check.check(root) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](docs/none.md)", "docs/none.md: no such file"),
        ("[a](docs/http.md#none)", "docs/http.md#none: no such heading"),
        ("[a](#none)", "#none: no such heading"),
        ("```\n# only in code\n```\n[a](#only-in-code)", "#only-in-code: no such heading"),
        ('<img src="docs/none.svg">', "docs/none.svg: no such file"),
        ("[![badge](docs/none.svg)](docs/http.md)", "docs/none.svg: no such file"),
        ("```\nmake nothing\n```", "make nothing: no such target"),
        ("Run `make nothing`.", "make nothing: no such target"),
    ],
)
def test_what_does_not_exist_is_named(root: Path, text: str, problem: str) -> None:
    (root / "README.md").write_text(text)
    assert docs_check.check(root) == [f"README.md: {problem}"]
