"""What the doctor finds: a name, how much it matters, what follows from it, and its mend."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One thing that was looked at."""

    name: str
    level: Level
    meaning: str
    """What was found, and what follows from it."""
    mend: str | None = None
    """What to do about it."""


def ok(name: str, meaning: str) -> Finding:
    """Something that is as it should be."""
    return Finding(name=name, level=Level.OK, meaning=meaning)


def note(name: str, meaning: str, mend: str | None = None) -> Finding:
    """Something to know; restores work."""
    return Finding(name=name, level=Level.NOTE, meaning=meaning, mend=mend)


def problem(name: str, meaning: str, mend: str) -> Finding:
    """Something that keeps restores from working."""
    return Finding(name=name, level=Level.PROBLEM, meaning=meaning, mend=mend)


def has_problem(findings: Sequence[Finding]) -> bool:
    """Whether one of them is a problem."""
    return any(finding.level is Level.PROBLEM for finding in findings)
