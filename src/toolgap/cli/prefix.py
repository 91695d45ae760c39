"""Options that name a prefix, and the files that they read."""

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from toolgap.calls import PrefixFields
from toolgap.protocol import PREFIX_FIELDS, Api, NamedPrefix

PANEL = "The prefix"


def _option(name: str, kind: Any, *flags: str, **settings: Any) -> inspect.Parameter:
    option = typer.Option(*flags, show_default=False, rich_help_panel=PANEL, **settings)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


OPTIONS = (
    _option("text", str, help="The prefix as text."),
    _option("text_file", str, metavar="FILE", help="It is in this file; - is stdin."),
    _option("ids_file", str, metavar="FILE", help="A JSON list of token ids; - is stdin."),
    _option(
        "messages",
        str,
        metavar="FILE",
        help="A JSON list of messages, or a whole request of /v1/chat/completions or /v1/messages; - is stdin.",
    ),
    _option("request_id", str, metavar="ID", help="A recent request: its prompt and its answer."),
    _option("api", Api, help="Whose form the messages have; openai if left out."),
    _option("extra_key", str, help="As in /generate."),
    _option("cache_salt", str, help="As in /generate."),
    _option("lora_path", str, "--lora", metavar="NAME", help="A LoRA adapter's name."),
    _option("dp_rank", int, min=0, help="With data parallelism: the continuation's replica."),
)
"""For :func:`toolgap.terminal.with_options`."""

_WAYS = {
    "text": "--text",
    "text_file": "--text-file",
    "ids_file": "--ids-file",
    "messages": "--messages",
    "request_id": "--request-id",
}


def read(given: dict[str, Any]) -> PrefixFields:
    """What the values of :data:`OPTIONS` name.

    Raises:
        typer.BadParameter: not exactly one prefix is named, or its file cannot be used.
    """
    ways = [way for way in _WAYS if given[way] is not None]
    if len(ways) != 1:
        *others, last = _WAYS.values()
        raise typer.BadParameter(f"give exactly one of {', '.join(others)} and {last}")
    [way] = ways
    if given["api"] is not None and way != "messages":
        raise typer.BadParameter("--api says whose form --messages has: leave it out")
    named: dict[str, Any] = {}
    match way:
        case "text_file":
            named["text"] = _text(given[way])
        case "ids_file":
            named["input_ids"] = _ids(given[way])
        case "messages":
            named = _conversation(given[way], given["api"])
        case _:
            named[way] = given[way]
    beside = {name: given[name] for name in ("extra_key", "cache_salt", "lora_path")}
    beside["routed_dp_rank"] = given["dp_rank"]
    named |= {name: value for name, value in beside.items() if value is not None}
    return cast(PrefixFields, named)


def _bytes(name: str) -> bytes:
    if name == "-" and sys.stdin is None:
        raise typer.BadParameter("cannot read -: stdin is closed")
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{name!r} is no name of a file: {error}") from None


def _text(name: str) -> str:
    try:
        return _bytes(name).decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8: {error}") from None


def _ids(name: str) -> list[int]:
    try:
        return msgspec.json.decode(_bytes(name), type=list[int])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{name} is no JSON list of token ids: {error}") from None


_TAKEN = tuple(
    name
    for name in NamedPrefix.__struct_fields__
    if name == "messages" or name not in (*PREFIX_FIELDS, "api")
)
"""Of a request's body: what shapes its prompt, and the namespace that it is in."""


def _conversation(name: str, api: Api | None) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(_bytes(name))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise typer.BadParameter(f"{name} is not JSON: {error}") from None
    body = content if isinstance(content, dict) else {"messages": content}
    messages = body.get("messages")
    if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise typer.BadParameter(
            f"{name} holds neither a list of messages nor a request's body with such a list as messages"
        )
    if api is None and _is_anthropic(body):
        raise typer.BadParameter(f"{name} is a request of /v1/messages: say so with --api anthropic")
    taken = {field: body[field] for field in _TAKEN if body.get(field) is not None}
    return taken if api is None else {**taken, "api": api}


def _is_anthropic(body: dict[str, Any]) -> bool:
    """Whether it has what only that API has; rendered by the other one, it would be another prompt."""
    tools = body.get("tools")
    return "system" in body or (
        isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
    )
