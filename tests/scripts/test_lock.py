from pathlib import Path

import pytest

import lock


def test_lock_left_out_list_and_pyproject_agree_with_what_is_installed() -> None:
    assert lock.check() == []


def test_lock_names_what_scripts_rely_on() -> None:
    pins = lock.parse_pins(lock.ENGINE.path.read_text(encoding="utf-8"))
    assert {"sglang", "torch", "torchvision", "ninja", "pip", "hatchling", "editables"} <= set(pins)


def test_pins_are_read_under_canonical_names() -> None:
    text = "# why\n\nTorch_Memory.Saver==0.0.10  # small\npip==26.3\n"
    assert lock.parse_pins(text) == {"torch-memory-saver": "0.0.10", "pip": "26.3"}


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==", "-r other.txt", "a==1\nA==2"])
def test_anything_but_one_pin_a_name_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="pin"):
        lock.parse_pins(line)


def test_header_ends_at_the_first_other_line() -> None:
    assert lock.header("# one\n#\n# two\n\na==1\n# not this\n") == "# one\n#\n# two\n"


def test_wanted_is_dependencies_extras_and_build_tools() -> None:
    project = {
        "dependencies": ["a"],
        "optional-dependencies": {"cpu": ["b"], "gateway": ["e"], "store": ["f"], "test": ["c"]},
    }
    pyproject = {"project": project, "build-system": {"requires": ["d"]}}
    assert lock.wanted(pyproject, lock.ENGINE) == ["a", "b", "e", "f", "c", "d", *lock.BUILD_TOOLS]


def test_wanted_has_what_a_file_adds(tmp_path: Path) -> None:
    project = {"dependencies": ["a"], "optional-dependencies": {"cpu": ["b"], "hook": ["c"]}}
    pyproject = {"project": project, "build-system": {"requires": ["d"]}}
    added = tmp_path / "added.in"
    added.write_text("# why\ne>=1\n", encoding="utf-8")
    wanted = lock.wanted(pyproject, lock.Lock(tmp_path / "added.txt", ("hook",), added=added))
    assert wanted == ["a", "c", "e>=1", "d", *lock.BUILD_TOOLS]


@pytest.mark.parametrize("one", [lock.AGENTS, lock.DEPLOY])
def test_another_lock_has_a_pin_for_everything_asked_for(one: lock.Lock) -> None:
    pins = lock.parse_pins(one.path.read_text(encoding="utf-8"))
    asked = [("pyproject.toml", text) for text in lock.wanted(lock.read_pyproject(), one)]
    assert lock.unmet(pins, (), asked) == []


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("torch>=2", None),
        ("torch<2", "s needs torch<2, the lock has torch==2.14.1"),
        ("flashinfer_python[cu13]==0.7.2", None),
        ("numba", "s needs numba, which is neither locked nor left out"),
        ("numba; sys_platform == 'plan9'", None),
        ("numba; extra == 'fast'", None),
    ],
)
def test_unmet(requirement: str, problem: str | None) -> None:
    pins, left_out = {"torch": "2.14.1"}, {"flashinfer-python"}
    expected = [] if problem is None else [problem]
    assert lock.unmet(pins, left_out, [("s", requirement)]) == expected
