"""What an operator can set: by flags, ``TOOLGAP_GATEWAY_*`` variables, or a TOML file, in this order."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from toolgap.gateway.policy import When

SECRETS = ("api_key",)
"""Shown as asterisks, and taken from no command line."""

PREFIX = "TOOLGAP_GATEWAY_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
KIB, MIB = 2**10, 2**20
DAY_S = 86_400


class ConfigError(ValueError):
    """A setting cannot be used; the text names it, and where it is from."""


def _seconds(text: str) -> Any:
    return Meta(ge=0, le=DAY_S, description=text)


def _some_seconds(text: str) -> Any:
    return Meta(gt=0, le=DAY_S, description=text)


def _count(text: str, *, low: int = 0, high: int | None = None) -> Any:
    return Meta(ge=low, le=high, description=text)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway's settings. Times are in seconds."""

    upstreams: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            min_length=1,
            description="A server that requests go to, as http://127.0.0.1:30000, without /v1; once for each.",
        ),
    ]
    host: Annotated[str, Meta(description="Whom it listens to; this machine only by default.")] = "127.0.0.1"
    port: Annotated[int, _count("Where it listens; 0 takes any free port.", high=65_535)] = 30_800
    max_body_bytes: Annotated[int, _count("Largest request body; a larger one gets 413.", low=1)] = 64 * MIB
    max_observed_body_bytes: Annotated[
        int, _count("A larger body passes without being looked at for sessions and tool calls.", low=1)
    ] = 16 * MIB
    max_backlog_bytes: Annotated[
        int,
        _count(
            "What may wait to be looked at, of all bodies together; what finds this full passes without.",
            low=1,
        ),
    ] = 64 * MIB
    session_timeout_s: Annotated[
        float,
        _some_seconds(
            "With several upstreams: the longest that a request waits for its session to be found."
        ),
    ] = 0.1
    connect_timeout_s: Annotated[
        float, _some_seconds("Longest time to connect to an upstream before the next one is tried.")
    ] = 5.0
    read_timeout_s: Annotated[
        float, _seconds("Longest silence of an upstream, before and within an answer; 0 is for ever.")
    ] = 0.0
    write_timeout_s: Annotated[
        float, _seconds("Longest time in which an upstream takes nothing of a request's body; 0 is for ever.")
    ] = 0.0
    max_idle_connections: Annotated[
        int, _count("Connections to each upstream that are kept open for requests to come.")
    ] = 256
    idle_s: Annotated[
        float,
        _seconds(
            "How long they are kept open; keep it below the upstream's own limit, which is 5 s for SGLang."
        ),
    ] = 3.0
    check_path: Annotated[
        str,
        Meta(
            pattern="^/",
            description="What upstreams are asked to see how they are; SGLang makes a token for it.",
        ),
    ] = "/health"
    check_interval_s: Annotated[float, _some_seconds("How long after an answer they are asked again.")] = 5.0
    check_timeout_s: Annotated[
        float,
        _some_seconds("How long they may take to answer; SGLang gives itself up to 20 s when it is busy."),
    ] = 25.0
    restore: Annotated[
        bool, Meta(description="Restore prefixes; off, the gateway only passes on what comes.")
    ] = True
    workers: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="Behind a router that is the upstream: the SGLang servers that are asked to restore; once for "
            "each. Without it the upstreams are asked."
        ),
    ] = ()
    when: Annotated[When, Meta(description="When to restore where no hint comes.")] = When.AT_PAUSE
    tool_gaps: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^=]+=[0-9.]+$")], ...],
        Meta(
            description="How long a tool takes, as NAME=SECONDS; once for each. What was told counts as a hint."
        ),
    ] = ()
    lease_s: Annotated[float, _some_seconds("With keep-warm: the lease of a restore.")] = 60.0
    retry_for_s: Annotated[
        float, _seconds("How long a restore that a server has no room for is tried again, within the gap.")
    ] = 30.0
    restore_timeout_s: Annotated[
        float, _some_seconds("The longest that a server may take to answer a submit.")
    ] = 10.0
    max_conversations: Annotated[
        int, _count("Conversations that are remembered; the one that was quiet longest is forgotten.", low=1)
    ] = 4096
    replicas: Annotated[
        int,
        _count(
            "With SGLang's data parallelism: how many replicas each server has. A conversation goes to one of them "
            "always (X-Data-Parallel-Rank), and is restored there.",
            low=1,
        ),
    ] = 1
    api_key: Annotated[
        str | None,
        Meta(
            description="For restores: SGLang's admin API key if it has one. Without it that of the requests is used."
        ),
    ] = None
    page: Annotated[bool, Meta(description="Show the live page, /toolgap.")] = True
    record: Annotated[
        str | None,
        Meta(description="A file that turns are appended to: their sizes and times, as JSON lines."),
    ] = None
    record_content: Annotated[
        bool, Meta(description="Record what was said, too: prompts, answers, names of tools.")
    ] = False
    drain_s: Annotated[
        int, _count("After SIGTERM: how long running answers may go on before they are cut off.", high=DAY_S)
    ] = 60

    def __post_init__(self) -> None:
        for field in ("upstreams", "workers"):
            normal = tuple(base_url(url) for url in getattr(self, field))
            twice = next((url for url in normal if normal.count(url) > 1), None)
            if twice is not None:
                raise ValueError(f"{twice} is given twice")
            msgspec.structs.force_setattr(self, field, normal)
        _ = self.told_s

    @property
    def told_s(self) -> dict[str, float]:
        """Seconds that tools take, by name.

        Raises:
            ValueError: one is no number.
        """
        pairs = [pair.rpartition("=") for pair in self.tool_gaps]
        return {tool: float(seconds) for tool, _, seconds in pairs}


def base_url(url: str) -> str:
    """An upstream's URL in the form that logs and metrics have.

    Raises:
        ValueError: it is no base URL of a server; the text says why, without what may be a password.
    """
    try:
        parsed = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise ValueError(f"an upstream is no URL: {error}") from None
    if parsed.userinfo:
        raise ValueError(
            f"the upstream of host {parsed.host!r} has a user or password in its URL: clients send their own keys"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"the upstream {url!r} must be a URL like http://127.0.0.1:30000")
    if parsed.query or parsed.fragment:
        raise ValueError(f"the upstream {url!r} must be without a query and a fragment")
    path = parsed.raw_path.decode().rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"the upstream {url!r} must be without /v1: a request brings its own path")
    return f"{parsed.scheme}://{parsed.netloc.decode()}{path}"


FIELDS = msgspec.structs.fields(Config)

SEVERAL = ("upstreams", "workers", "tool_gaps")
"""Fields that are given once for each of their values."""


def shown(config: Config) -> dict[str, Any]:
    """The settings as they may be shown."""
    values = msgspec.structs.asdict(config)
    return values | {name: "***" for name in SECRETS if values[name] is not None}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Config:
    """The settings: a flag comes before a variable, a variable before the file, and the file before the default.

    Args:
        flags: By the names of the fields; None and an empty list are no value.
        environ: The environment. Lists have blanks or commas between their values there.
        file: TOML with the names of the fields; if None, the one that ``TOOLGAP_GATEWAY_CONFIG`` names, if any.

    Raises:
        ConfigError: a value cannot be used, a name is unknown, or the file cannot be read.
    """
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    names = {field.name for field in FIELDS}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if file is not None:
        found = _read(file)
        if strange := sorted(found.keys() - names):
            raise ConfigError(f"{strange[0]} in {file} is no setting of the gateway")
        values |= found
        origins |= {name: f"{name} in {file}" for name in found}
    known = {variable(name) for name in names} | {FILE_VARIABLE}
    if unknown := sorted(name for name in environ if name.startswith(PREFIX) and name not in known):
        raise ConfigError(f"{unknown[0]} is no setting of the gateway")
    for name in names:
        if text := environ.get(variable(name), "").strip():
            values[name] = text.replace(",", " ").split() if name in SEVERAL else text
            origins[name] = variable(name)
    for name, given in flags.items():
        if given is not None and given != []:
            values[name] = given
            origins[name] = flag(name)
    if "upstreams" not in values:
        raise ConfigError(f"no upstream: give {flag('upstreams')} http://HOST:PORT, once or more often")
    try:
        return msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        said = str(error).split(" - at ")[0]
        # What names no field is about all upstreams together.
        wrong = next((name for name in values if f"`$.{name}" in str(error)), "upstreams")
        raise ConfigError(f"{origins[wrong]}: {said}") from None


def flag(name: str) -> str:
    """The command's option of a setting."""
    return f"--{name.rstrip('s') if name in SEVERAL else name}".replace("_", "-")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}") from None
