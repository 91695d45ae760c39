#!/usr/bin/env python3
"""Writes the pages of docs/ that are made from the source, or with --check compares them with it.

They are docs/http.md, from toolgap.protocol, docs/settings.md, from toolgap.settings, docs/metrics.md, from
toolgap.sglang.metrics, and docs/cli.md, from toolgap.cli.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec.inspect import (
    AnyType,
    BoolType,
    DictType,
    EnumType,
    FloatType,
    IntType,
    ListType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    type_info,
)
from typer.main import get_command

from toolgap.cli import app
from toolgap.cli.prefix import PANEL as PREFIX_PANEL
from toolgap.cli.serve import SETTINGS_PANEL
from toolgap.client import DEFAULT_URL
from toolgap.protocol import (
    CODES,
    PATH,
    REASONS,
    STATES,
    UNSUPPORTED_FIELDS,
    VERSION,
    Cancel,
    Code,
    Divergence,
    EngineStatus,
    Error,
    ErrorReply,
    Estimate,
    NamedPrefix,
    OperationStatus,
    Overview,
    Reason,
    Refused,
    Resolve,
    Resolved,
    State,
    Status,
    Submit,
)
from toolgap.settings import Settings, variable
from toolgap.sglang.metrics import PREFIX, Kind, Metric
from toolgap.terminal import (
    API_KEY_VARIABLE,
    DEBUG_VARIABLE,
    EXITS,
    FAILURES,
    URL_VARIABLE,
    ApiKey,
    Json,
    Url,
)

ROOT = Path(__file__).resolve().parent.parent
URL = f"http://127.0.0.1:30000{PATH}"


def generated_from(module: str) -> str:
    return f"<!-- Made from {module} by scripts/docs.py: change it there, and run the script. -->"


# ---- Markdown ----


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


def fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: one line a paragraph, references to classes as links to their sections."""
    text = inspect.cleandoc(docstring or "").replace("``", "`")
    text = re.sub(r":class:`(\w+)`", lambda match: f"[`{match[1]}`](#{match[1].lower()})", text)
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


# ---- types ----


class Described(NamedTuple):
    """A field's type without its annotations."""

    type: Type
    description: str
    nullable: bool


def describe(kind: Type) -> Described:
    """Strip annotations and null; what a field says comes before what its type says."""
    if isinstance(kind, Metadata):
        inner = describe(kind.type)
        own = (kind.extra_json_schema or {}).get("description", "")
        return inner._replace(description=f"{own} {inner.description}".strip())
    if isinstance(kind, UnionType):
        [inner_type] = [part for part in kind.types if not isinstance(part, NoneType)]
        return describe(inner_type)._replace(nullable=True)
    return Described(kind, "", nullable=False)


def type_name(kind: Type) -> str:
    described = describe(kind)
    match described.type:
        case StrType():
            name = "string"
        case BoolType():
            name = "boolean"
        case FloatType():
            name = "number"
        case IntType(ge=low, lt=high):
            name = "integer" if low is None or high is None else f"integer, {low} to {high - 1}"
        case EnumType(cls=cls) if cls not in ENUM_SECTIONS:
            name = " or ".join(code(json.dumps(member.value)) for member in cls)
        case EnumType(cls=cls):
            name = f"[{cls.__name__.lower()}](#{ENUM_SECTIONS[cls]})"
        case ListType(item_type=StructType(cls=cls)):
            name = f"array of [`{cls.__name__}`](#{cls.__name__.lower()})"
        case ListType(item_type=item):
            name = f"array of {type_name(item).replace('integer', 'integers')}"
        case StructType(cls=cls):
            name = f"[`{cls.__name__}`](#{cls.__name__.lower()})"
        case DictType():
            name = "object"
        case AnyType():
            name = "any"
        case other:
            raise TypeError(f"no name for {other}")
    return f"{name} or null" if described.nullable else name


ENUM_SECTIONS: dict[type[Any], str] = {State: "states", Reason: "reasons", Code: "errors"}


def request_table(command: type[msgspec.Struct]) -> str:
    rows = [[code("action"), code(json.dumps(command.__struct_config__.tag)), "required", ""]]
    for field in struct(command).fields:
        if field.name not in UNSUPPORTED_FIELDS:
            described = describe(field.type)
            default = "required" if field.required else code(json.dumps(field.default))
            rows.append([code(field.name), type_name(described.type), default, described.description])
    return table(["field", "type", "default", "meaning"], rows)


def reply_table(reply: type[msgspec.Struct], *, sent_always: bool = True) -> str:
    rows = []
    for field in struct(reply).fields:
        described = describe(field.type)
        kind = type_name(field.type if sent_always else described.type)
        if not sent_always and not field.required:
            kind += ", may be absent"
        rows.append([code(field.name), kind, described.description])
    return table(["field", "type", "meaning"], rows)


def struct(cls: type[msgspec.Struct]) -> StructType:
    found = type_info(cls)
    assert isinstance(found, StructType)
    return found


# ---- examples ----


def curl(body: dict[str, Any]) -> str:
    return fence("sh", f"curl -s {URL} -d '{json.dumps(body)}'")


def reply_of(reply: msgspec.Struct) -> str:
    return fence("json", msgspec.json.format(msgspec.json.encode(reply), indent=2).decode())


PAGE_TOKENS = 64
NAMESPACE = "9f2c41d07be3a658"
ACCEPTED = OperationStatus(
    operation_id="turn-7",
    state=State.QUERYING,
    requested_tokens=8200,
    aligned_tokens=8192,
    resident_tokens=2048,
    ttl_s=60.0,
    elapsed_s=0.0,
    submitted_ts=1795946400.25,
    namespace=NAMESPACE,
)
RESTORED = msgspec.structs.replace(
    ACCEPTED,
    state=State.RESTORED,
    reason=Reason.COMPLETE,
    found_tokens=6144,
    read_tokens=6144,
    inserted_tokens=6144,
    elapsed_s=0.5,
    queried_s=0.004,
    first_read_s=0.09,
    read_s=0.498,
)
CANCELLED = msgspec.structs.replace(
    ACCEPTED, state=State.RESTORING, found_tokens=6144, queried_s=0.004, stopping=True
)
OVERVIEW = Overview(
    active=[],
    recent=[RESTORED],
    engine=EngineStatus(
        namespace=NAMESPACE,
        storage_backend="file",
        prefetch_policy="timeout",
        prefetch_threshold_tokens=256,
        page_tokens=PAGE_TOKENS,
        host_total_tokens=262144,
        host_free_tokens=131072,
        prefetch_capacity_tokens=131072,
        prefetch_occupied_tokens=0,
        prefetch_retries_pending=0,
        reads_in_flight=0,
        max_operations=16,
        max_operation_tokens=131072,
        waiting_joins=0,
        stalled_reads=0,
        paused=False,
    ),
)
MESSAGES = [
    {"role": "user", "content": "What is in this folder?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "list_files", "arguments": "{}"}}
        ],
    },
]
RESOLVED = Resolved(token_ids=[151644, 872, 198, 3838], stable_tokens=3, expected_tokens=1)
REFUSED = Refused(
    Code.HOST_BUDGET,
    "active operations read into 126976 of 131072 tokens of host memory, and this one needs 6144",
    retry_after_s=0.5,
).error


# ---- docs/http.md ----


def http_page() -> str:
    return "\n\n".join(
        [
            generated_from("src/toolgap/protocol.py"),
            f"# HTTP reference: `POST {PATH}`",
            "One endpoint on the SGLang server itself. A body is one JSON object, and its `action` says what to do: "
            "[`submit`](#submit), [`status`](#status), [`cancel`](#cancel) or [`resolve`](#resolve). "
            "Every reply is a JSON object; one that "
            f"is not 200 is an [error](#errors). This is version {VERSION} of the format.",
            "The endpoint asks for the same key as SGLang's own `/hicache/*` routes: see "
            "[authorisation](operating.md#authorisation). Field names carry their unit: `_tokens`, `_s` (seconds). "
            "In the examples the prompt is cut short and all values are invented.",
            *submit_section(),
            *status_section(),
            *cancel_section(),
            *resolve_section(),
            *replies_section(),
            *states_section(),
            *errors_section(),
        ]
    )


def submit_section() -> Iterator[str]:
    yield "## submit"
    yield prose(Submit.__doc__)
    yield prose(NamedPrefix.__doc__)
    yield request_table(Submit)
    yield (
        f"`null` says the same as leaving a field out. Without `ttl_s`, `{variable('default_ttl_s')}` holds "
        "([settings](settings.md)).\n\n"
        "The same `operation_id` with the same prefix answers with the operation that has it, active or recent, and "
        "starts nothing; to restore a prefix again, use a new id. A prefix that is resident ends at once, "
        "`restored` with nothing read."
    )
    yield curl({"action": "submit", "operation_id": "turn-7", "input_ids": [151644, 8948, 198, 2610, 525]})
    yield reply_of(ACCEPTED)
    yield (
        "A request whose tool calls have just been sent names its continuation by its own `id`. Its tokens are exact; "
        "the next prompt begins with them as far as the chat template shows the answer as the model wrote it "
        "([why it may not](prefixes.md)). By `messages` the server renders what the next prompt certainly begins "
        "with, which is exact in that respect, and costs a few passes of the tokenizer:"
    )
    yield curl({"action": "submit", "request_id": "4f1d2c6e0b"})
    yield curl({"action": "submit", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}})
    yield "These fields are known and answered with 501, so that nothing else is restored in their place:"
    yield table(
        ["field", "what is not supported"],
        [[code(name), what] for name, what in UNSUPPORTED_FIELDS.items()],
    )


def status_section() -> Iterator[str]:
    yield "## status"
    yield prose(Status.__doc__)
    yield request_table(Status)
    yield (
        "With an id the reply is an [`OperationStatus`](#operationstatus), without one an [`Overview`](#overview). "
        "`wait_s` makes it a long poll. Asking never touches the cache, so it keeps nothing in memory."
    )
    yield curl({"action": "status", "operation_id": "turn-7", "wait_s": 30})
    yield reply_of(RESTORED)
    yield curl({"action": "status"})
    yield reply_of(OVERVIEW)


def cancel_section() -> Iterator[str]:
    yield "## cancel"
    yield prose(Cancel.__doc__)
    yield request_table(Cancel)
    yield (
        "What has landed stays in host memory as ordinary cache. An operation that has ended is left as it is, and "
        "its outcome is the reply."
    )
    yield curl({"action": "cancel", "operation_id": "turn-7"})
    yield reply_of(CANCELLED)


def resolve_section() -> Iterator[str]:
    yield "## resolve"
    yield prose(Resolve.__doc__)
    yield request_table(Resolve)
    yield curl({"action": "resolve", "messages": MESSAGES})
    yield reply_of(RESOLVED)


def replies_section() -> Iterator[str]:
    yield "## Replies"
    for reply in (OperationStatus, Estimate, Divergence, Overview, EngineStatus, Resolved):
        yield f"### {reply.__name__}"
        yield prose(reply.__doc__)
        yield reply_table(reply)


def states_section() -> Iterator[str]:
    yield "## States"
    yield "An operation passes through the first two and ends in exactly one of the others, with a [reason](#reasons)."
    yield table(
        ["state", "", "meaning"],
        [[code(state), "ended" if state.terminal else "active", text] for state, text in STATES.items()],
    )
    yield "## Reasons"
    yield table(["reason", "meaning"], [[code(reason), text] for reason, text in REASONS.items()])


def errors_section() -> Iterator[str]:
    yield "## Errors"
    yield f"{prose(ErrorReply.__doc__)} It has one field, `error`:"
    yield reply_table(Error, sent_always=False)
    yield (
        "`retry_after_s` is given wherever the same call is worth trying again, and only there; the reply then also "
        "has the header `Retry-After`, in whole seconds. A submit with an `operation_id` may be repeated without harm, "
        "also when its reply was lost. The Python client repeats it by itself: see "
        "[retries](operating.md#retries).\n\n"
        'A missing or wrong key is answered by SGLang itself: 401 or 403 with `{"error": "Unauthorized"}` or '
        '`{"error": "Forbidden"}`.'
    )
    yield reply_of(ErrorReply(error=REFUSED))
    ordered = sorted(CODES.items(), key=lambda item: item[1].status)
    yield table(
        ["HTTP", "code", "retry", "meaning"],
        [
            [f"{status.value} {status.phrase}", code(name), retry, text]
            for name, (status, text, retry) in ordered
        ],
    )


# ---- docs/settings.md ----

KINDS = {bool: "true or false", int: "whole number", float: "number"}


def settings_page() -> str:
    rows = [
        [
            code(variable(setting.name)),
            code(
                str(setting.default).lower()
                if isinstance(setting.default, bool | StrEnum)
                else f"{setting.default:.12g}"
            ),
            bounds(type(setting.default), setting.metadata),
            setting.metadata["help"],
        ]
        for setting in fields(Settings)
    ]
    return "\n\n".join(
        [
            generated_from("src/toolgap/settings.py"),
            "# Settings",
            "The plugin reads these environment variables when the server starts. A variable that is unset or empty "
            "keeps its default. `toolgap serve` has an option for each: `TOOLGAP_MAX_OPERATIONS` is "
            "`--max-operations`. Names that end in `_S` are in seconds.",
            "A value that cannot be used turns Toolgap off: the server starts without the endpoint, and its log names "
            "the variable. `toolgap doctor` finds it before that.",
            table(["variable", "default", "values", "meaning"], rows),
            "True is written `true`, `yes`, `on` or `1`, and false `false`, `no`, `off` or `0`.",
        ]
    )


def bounds(kind: type, limits: Any) -> str:
    low, high, above = limits["low"], limits["high"], limits["above"]
    if kind is bool:
        return KINDS[kind]
    if issubclass(kind, StrEnum):
        return " or ".join(map(code, kind))
    least = f"more than {low:g}" if above else f"at least {low:g}"
    return f"{KINDS[kind]}, {least}" if math.isinf(high) else f"{KINDS[kind]}, {least}, at most {high:g}"


# ---- docs/metrics.md ----


def metrics_page() -> str:
    return "\n\n".join(
        [
            generated_from("src/toolgap/sglang/metrics.py"),
            "# Metrics",
            "A server started with `--enable-metrics` shows restores on SGLang's own endpoint, `GET /metrics`, beside "
            f"SGLang's metrics and in their naming: every name begins with `{PREFIX}`.",
            *metrics_section(),
            *watching_section(),
            *alerts_section(),
        ]
    )


def metrics_section() -> Iterator[str]:
    yield "## What is exported"
    yield table(
        ["metric", "kind", "labels of its own", "meaning"],
        [
            [code(name), kind, ", ".join(map(code, labels)), text]
            for name, kind, text, labels, _ in (metric.value for metric in Metric)
        ],
    )
    yield (
        "`state` and `reason` are those of [outcomes](http.md#states), `code` that of [errors](http.md#errors). Beside "
        "them every metric has the labels of SGLang's scheduler metrics, such as the model's name and the replica's "
        "rank, and those of `--extra-metric-labels`. One process counts for each replica (its first tensor-parallel "
        "and pipeline rank), so a sum over all series counts nothing twice, also with "
        "`--enable-metrics-for-all-schedulers`. The storage backend is no label: it can be replaced at run time, and "
        "[status](http.md#status) names it."
    )
    yield (
        "Refusals are those of the scheduler. A call that does not get there, such as a malformed body, is in none of "
        "these; SGLang's metrics of HTTP requests have it. Tokens of an operation are counted when it ends, and used "
        "and wasted ones later, so compare rates over minutes. SGLang's own prefetch metrics count the reads of "
        "operations as well."
    )
    buckets = {
        metric.value.name: metric.value.buckets for metric in Metric if metric.value.kind is Kind.HISTOGRAM
    }
    yield "Histograms have these upper bounds, and infinity:"
    yield table(
        ["histogram", "bounds"],
        [[code(name), ", ".join(f"{bound:g}" for bound in bounds)] for name, bounds in buckets.items()],
    )


def watching_section() -> Iterator[str]:
    yield "## What to watch"
    yield (
        "[`observability/grafana-dashboard.json`](../observability/grafana-dashboard.json) is a dashboard for Grafana: "
        "import it, and choose the Prometheus data source. The questions that it answers, most telling first:"
    )
    yield table(
        ["question", "look at", "if not"],
        [
            [
                "Is what is restored used?",
                f"{code(Metric.USED_TOKENS.value.name)} over {code(Metric.INSERTED_TOKENS.value.name)}: near 1",
                "Submitted prefixes differ from the continuations', or these come too late, after eviction, or never.",
            ],
            [
                "Do restores end in time?",
                f"{code(Metric.DURATION.value.name)} against the gap; {code(Metric.JOINED.value.name)} counts requests "
                "that came before the end",
                "Submit earlier. Joins are no fault: the request waits for the rest of a read and not for all of it.",
            ],
            [
                "Is storage fast enough?",
                f"{code(Metric.BANDWIDTH.value.name)}, for one rank",
                "See to the storage, or use larger pages ([`--page-size`](operating.md#flags-of-sglang-that-matter)).",
            ],
            [
                "Is there anything to restore?",
                f"{code(Metric.FOUND_TOKENS.value.name)} against what was requested and not resident",
                "KV is not stored yet, not any more, or under another [namespace](operating.md#namespaces).",
            ],
            [
                "Do they fit?",
                f"{code(Metric.REFUSED.value.name)} by code; {code(Metric.READING_TOKENS.value.name)} against "
                f"{code(Metric.BUDGET_TOKENS.value.name)}",
                "See [limits and budgets](operating.md#limits-and-budgets).",
            ],
            [
                "Does storage answer?",
                f"{code(Metric.STALLED_CALLS.value.name)}: 0",
                "A storage call hangs; submits are refused until it returns.",
            ],
        ],
    )
    yield (
        f"{code(Metric.SAVED_SECONDS.value.name)} is an estimate: for each request that used restored pages, the time "
        "that it would have waited for their read."
    )


def alerts_section() -> Iterator[str]:
    yield "## Alerts"
    yield (
        "[`observability/alerts.yaml`](../observability/alerts.yaml) is a rule file for Prometheus. Its thresholds are "
        "a start; fit them to your traffic."
    )
    yield table(
        ["alert", "fires when", "what to do"],
        [
            [
                "`ToolgapStorageStalled`",
                "a storage call that was given up has not returned for a minute",
                "See to the storage backend. Ordinary requests may wait behind the same storage thread.",
            ],
            [
                "`ToolgapRestoresUnused`",
                "for half an hour, more than 1,000 tokens a second were restored and less than a fifth of them used",
                "Compare what is submitted with what is asked later; submit nothing for turns that do not come.",
            ],
            [
                "`ToolgapSubmitsRefused`",
                "for ten minutes, more submits were refused than accepted, more than one in ten seconds",
                "Its codes say why: a limit to raise, storage to mend, or a caller that should wait as it is told.",
            ],
        ],
    )


# ---- docs/cli.md ----


def cli_page() -> str:
    return "\n\n".join(
        [
            generated_from("src/toolgap/cli/"),
            "# Command line",
            "`toolgap` and `python -m toolgap` are the same. `--help` behind any command shows what is below.",
            *shared_section(),
            *exits_section(),
            *prefix_section(),
            *(
                part
                for name, command in leaf_commands(get_command(app))
                for part in command_section(name, command)
            ),
        ]
    )


def leaf_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaf_commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def shared_section() -> Iterator[str]:
    yield "## What all share"
    yield (
        f"- **The server** is `--url` or `${URL_VARIABLE}`, else `{DEFAULT_URL}`, and its "
        f"[key](operating.md#authorisation) `--api-key` or `${API_KEY_VARIABLE}`.\n"
        "- **stdout is for what was asked for**, with `--json`, which every command has, as JSON: that of the "
        "server's [replies](http.md#replies), where it is one. Complaints and progress go to stderr. The exit status "
        "tells what a script has to know.\n"
        "- **A file named `-`** is stdin.\n"
        f"- **No traceback** unless `{DEBUG_VARIABLE}=1` asks for one.\n"
        "- **Shell completion**: `toolgap --install-completion`, or `toolgap --show-completion` to see it first."
    )


def exits_section() -> Iterator[str]:
    yield "## Exit status"
    yield table(["status", "meaning"], [[code(status.value), text] for status, text in EXITS.items()])
    yield (
        "A command that another signal stops ends with 128 and the signal's number. `toolgap serve` becomes the "
        "server, and its exit status is then SGLang's. Status 1 is given by these commands only:"
    )
    yield table(["command", "1 means"], [[code(f"toolgap {name}"), text] for name, text in FAILURES.items()])


def command_section(name: str, command: Any) -> Iterator[str]:
    yield f"## toolgap {name}"
    yield prose(command.help)
    panels = {parameter.rich_help_panel for parameter in command.params}
    rows = [
        [named_by(parameter), default_of(parameter), help_of(parameter)]
        for parameter in sorted(command.params, key=lambda one: one.param_type_name)
        if parameter.rich_help_panel not in (SETTINGS_PANEL, PREFIX_PANEL) and not is_shared(parameter)
    ]
    if rows:
        yield table(["", "default", "meaning"], rows)
    if PREFIX_PANEL in panels:
        yield "Which prefix is said by the [options that name one](#the-prefix)."
    if SETTINGS_PANEL in panels:
        yield "It also has an option for each of the plugin's [settings](settings.md)."


def is_shared(parameter: Any) -> bool:
    """Whether it is one of the options that the first section is about."""
    return parameter.help in [get_args(option)[1].help for option in (Url, ApiKey, Json)]


def prefix_section() -> Iterator[str]:
    yield "## The prefix"
    yield (
        "`toolgap submit` and `toolgap resolve` take exactly one of the first five. Of a whole request of "
        "`/v1/chat/completions` or `/v1/messages`, they take what shapes its prompt and the namespace that it is in, "
        "and leave the rest; an option given beside it comes before what the request says."
    )
    group: Any = get_command(app)
    options = [one for one in group.commands["submit"].params if one.rich_help_panel == PREFIX_PANEL]
    yield table(["", "meaning"], [[named_by(option), help_of(option)] for option in options])


def named_by(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return code(parameter.metavar)
    return flags_of(parameter)


def flags_of(option: Any) -> str:
    both = " / ".join([*option.opts, *option.secondary_opts])
    return code(both if option.is_flag else f"{both} {option.metavar or kind_of(option)}")


def kind_of(option: Any) -> str:
    kind = option.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return {int: "N", list[int]: "N", list[float]: "NUMBER", float: "NUMBER"}.get(kind, "TEXT")


def default_of(option: Any) -> str:
    if option.param_type_name == "argument":
        return ""
    if isinstance(option.show_default, str):
        return option.show_default
    shown = option.show_default and option.default not in (None, False) and not option.is_flag
    return code(getattr(option.default, "value", option.default)) if shown else ""


def help_of(parameter: Any) -> str:
    return str(parameter.help or "")


# ---- files ----

PAGES = {
    "docs/http.md": http_page,
    "docs/settings.md": settings_page,
    "docs/metrics.md": metrics_page,
    "docs/cli.md": cli_page,
}


def stale(root: Path) -> list[str]:
    """Names of the pages that differ from what would be written."""
    return [
        name
        for name, page in PAGES.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != page() + "\n"
    ]


def write(root: Path) -> None:
    for name, page in PAGES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(page() + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    if not parser.parse_args(arguments).check:
        write(root)
        return 0
    names = stale(root)
    for name in names:
        print(f"{name} is stale: run scripts/docs.py", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
