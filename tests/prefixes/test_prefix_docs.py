"""The page on prefixes says of every cause what the command says."""

import re
from pathlib import Path

from toolgap.prefixes.causes import CAUSES, Cause
from toolgap.terminal import Exit

PAGE = (Path(__file__).parent.parent.parent / "docs" / "prefixes.md").read_text(encoding="utf-8")


def test_every_cause_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| .+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert rows == [(cause.value, *CAUSES[cause]) for cause in Cause]


def test_the_exit_statuses_are_those_of_the_command_line() -> None:
    told = re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)
    known = [Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNREACHABLE, Exit.REFUSED]
    assert told == [str(status.value) for status in known]
