"""The agent's tools and the small repository they work on: files are really read, tests really run."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolgap.demo.errors import DemoError

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read the first lines of a file of the repository.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Path inside the repository."},
                    "lines": {"type": "integer", "description": "How many lines to read."},
                },
                "required": ["path", "lines"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run_tests",
            "description": "Run the repository's tests and return what the test runner printed.",
            "parameters": {
                "type": "object",
                "properties": {"module": {"type": "string", "description": "The test module."}},
                "required": ["module"],
            },
        },
    },
]
"""Definitions of the tools, as an agent sends them with a chat completion."""

VENDORED = (
    *("textwrap", "shlex", "fnmatch", "csv", "configparser", "cmd", "pprint", "calendar"),
    *("optparse", "argparse", "difflib", "statistics", "ast", "enum"),
)
"""Modules of Python's own library that the repository holds copies of, in the order they are read."""

OTHERS = ("inspect", "typing", "tarfile", "doctest", "pickletools", "pydoc", "subprocess", "threading")
"""Modules that other agents read, so that their prompts push this one's KV out of memory."""

TEST_MODULE = "test_wrap"
TEST_TIMEOUT_S = 60.0

_TEST_SOURCE = '''\
"""Tests of the vendored text wrapping."""

import unittest

from vendored import textwrap


class WrapTest(unittest.TestCase):
    def test_join(self):
        self.assertEqual(textwrap.wrap("one two", width=7), ["one two"])

    def test_split(self):
        self.assertEqual(textwrap.wrap("one two three", width=7), ["one two", "three"])
'''


@dataclass(frozen=True)
class Repository:
    """A small Python repository in a folder of its own, with tests that pass."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> "Repository":
        """Write the repository into an empty folder."""
        vendored = folder / "vendored"
        vendored.mkdir(parents=True)
        (vendored / "__init__.py").touch()
        for module in VENDORED:
            shutil.copyfile(library_source(module), vendored / f"{module}.py")
        (folder / f"{TEST_MODULE}.py").write_text(_TEST_SOURCE, encoding="utf-8")
        return cls(folder)

    def files(self) -> list[tuple[str, int]]:
        """The vendored files in the order in which the agent reads them, with their lines."""
        return [(path := f"vendored/{module}.py", len(self._text(path).splitlines())) for module in VENDORED]

    def read_file(self, path: str, lines: int) -> str:
        """The tool ``read_file``."""
        return "\n".join(self._text(path).splitlines()[:lines])

    def run_tests(self, module: str) -> str:
        """The tool ``run_tests``: runs the tests in a process of their own.

        What differs between equal runs is taken out of the output: the seconds that the tests took, and
        the folder. Equal runs then give equal prompts, which is what lets the demo compare outputs.
        """
        # Without site packages: the tests need none, and an environment with an engine in it is slow to scan.
        command = [sys.executable, "-E", "-S", "-B", "-m", "unittest", module]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TEST_TIMEOUT_S,
                env={**os.environ, "NO_COLOR": "1"},
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"the agent's tool, a run of two tests, took over {TEST_TIMEOUT_S:g} s") from None
        return without_chance(done.stdout, self.folder)

    def _text(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")


def without_chance(output: str, folder: Path) -> str:
    """A test runner's output without what differs between equal runs."""
    for name in {str(folder.resolve()), str(folder)}:
        output = output.replace(f"{name}{os.sep}", "")
    return re.sub(r"^(Ran \d+ tests?) in [\d.]+s$", r"\1", output, flags=re.MULTILINE).strip()


def library_source(module: str) -> Path:
    """The source file of a module of Python's own library.

    Raises:
        DemoError: this Python came without its sources.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise DemoError(
            f"this Python has no source file of its own module {module}, and the demo's prompt is made of "
            "such files: use a Python with a complete standard library"
        )
    return Path(spec.origin)


def library_text(modules: Sequence[str]) -> str:
    """The sources of these modules of Python's own library, one after the other."""
    return "\n".join(library_source(module).read_text(encoding="utf-8") for module in modules)
