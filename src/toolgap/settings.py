"""Settings of the plugin, read from ``TOOLGAP_*`` environment variables.

SGLang loads plugins before it parses its arguments, so the environment is the only channel that
reaches every process; ``toolgap serve`` sets it from flags.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

PREFIX = "TOOLGAP_"


class SettingsError(ValueError):
    """A ``TOOLGAP_*`` variable has a value that cannot be used; the text names it."""


class Admission(StrEnum):
    """What follows from the estimate of a restore."""

    DECLINE = "decline"
    REPORT = "report"


def _setting(
    default: Any, help_text: str, *, low: float = 0, high: float = math.inf, above: bool = False
) -> Any:
    return field(default=default, metadata={"help": help_text, "low": low, "high": high, "above": above})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an operator can set. Times are in seconds; every field is one ``TOOLGAP_*`` variable."""

    max_operations: int = _setting(
        16, "Operations at once; 1 is the strict single-trajectory mode.", low=1, high=4096
    )
    max_outcomes: int = _setting(32, "Recent outcomes that status remembers.", low=1, high=65536)
    default_ttl_s: float = _setting(60.0, "TTL of a submit that names none.", above=True, high=86400)
    max_operation_tokens: int = _setting(
        0, "Longest span that one operation may read, in tokens; 0: as much as all of them together."
    )
    host_share: float = _setting(
        0.5, "Share of host memory (L2) that active operations may read into.", above=True, high=1
    )
    piece_tokens: int = _setting(
        8192,
        "A longer restore is read in pieces of so many tokens, so that other reads get in between.",
        low=1,
    )
    reads_at_once: int = _setting(
        2, "Pieces that operations may have with SGLang's storage threads at once.", low=1, high=4096
    )
    switch_interval_s: float = _setting(
        0.0005,
        "While operations are active: how long SGLang's storage threads may keep its scheduler waiting for Python's "
        "interpreter, or the other way round (`sys.setswitchinterval`); 0 leaves it as it is.",
        high=1,
    )
    lease_share: float = _setting(
        0.25, "Share of host memory (L2) that leases may hold; 0 refuses leases.", high=1
    )
    max_lease_s: float = _setting(600.0, "Longest lease.", above=True, high=86400)
    admission: Admission = _setting(  # noqa: RUF009 - as immutable as a number
        Admission.DECLINE,
        "What follows from the estimate of a restore: `decline` refuses one that is not worth it, or that would evict "
        "restored KV whose continuation is expected earlier; `report` refuses neither.",
    )
    join: bool = _setting(True, "Whether a request that needs pages an operation is reading waits for them.")
    join_timeout_s: float = _setting(
        0.0, "Longest such wait; 0 takes SGLang's own budget for a storage read of that length."
    )
    stall_timeout_s: float = _setting(
        30.0,
        "An operation whose storage makes no progress for this long ends as storage_stalled.",
        above=True,
    )
    reader_patience_s: float = _setting(
        60.0,
        "A storage call that was given up as stalled gets so long to return before SGLang's thread that makes it "
        "is replaced.",
        above=True,
    )
    stop_grace_s: float = _setting(
        2.0,
        "After a cancel or expiry: how long the storage call in flight may take before it is given up.",
    )
    recorded_tokens: int = _setting(
        2_000_000,
        "Tokens of recent requests to remember (8 bytes each), so that a submit can name a prefix by `request_id`; "
        "0 remembers none.",
    )
    max_body_bytes: int = _setting(32 * 2**20, "Largest request body.", low=1024)
    reply_timeout_s: float = _setting(
        30.0,
        "How long the HTTP process waits for the scheduler before it answers engine_busy.",
        above=True,
    )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings; unset or empty variables keep their default.

        Raises:
            SettingsError: a value is no number, or out of range.
        """
        values: dict[str, Any] = {}
        for setting in fields(cls):
            text = environ.get(variable(setting.name), "").strip()
            if text:
                values[setting.name] = _parse(setting.name, text, type(setting.default), setting.metadata)
        return cls(**values)

    def to_environ(self) -> dict[str, str]:
        """The variables that :meth:`from_environ` reads back to an equal object."""
        return {variable(f.name): str(getattr(self, f.name)) for f in fields(self)}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _parse(name: str, text: str, kind: type, bounds: Mapping[str, Any]) -> bool | int | float | StrEnum:
    if issubclass(kind, StrEnum):
        try:
            return kind(text.lower())
        except ValueError:
            raise SettingsError(f"{variable(name)}={text!r}: write {' or '.join(kind)}") from None
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise SettingsError(f"{variable(name)}={text!r}: write true or false")
        return _BOOLEANS[text.lower()]
    try:
        value: int | float = int(text) if kind is int else float(text)
        finite = math.isfinite(value)
    except (ValueError, OverflowError):
        raise SettingsError(
            f"{variable(name)}={text!r}: write {'a whole number' if kind is int else 'a number'}"
        ) from None
    low, high = bounds["low"], bounds["high"]
    if not (finite and (low < value if bounds["above"] else low <= value) and value <= high):
        least = f"more than {low:g}" if bounds["above"] else f"at least {low:g}"
        most = f" and at most {high:g}" if math.isfinite(high) else "" if finite else " and finite"
        raise SettingsError(f"{variable(name)}={text!r}: must be {least}{most}")
    return value
