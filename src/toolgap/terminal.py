"""What every command shares: exit statuses, how it prints, how it ends, and common options."""

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import msgspec
import typer
from rich.console import Console

from toolgap.client import Toolgap, ToolgapError, ToolgapUnreachable
from toolgap.protocol import Estimate


class Exit(IntEnum):
    """Exit statuses of every command, beside SGLang's own for ``serve``."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    FAULT = 5
    INTERRUPTED = 130


EXITS: dict[Exit, str] = {
    Exit.OK: "done; for wait: the whole prefix was restored",
    Exit.FAILED: "what was asked for did not come true: a restore, a check or an invariant",
    Exit.USAGE: "wrong options, arguments or settings",
    Exit.UNREACHABLE: "no server answers, or one without Toolgap",
    Exit.REFUSED: "the server refused: an API key, a limit, or what it cannot do",
    Exit.FAULT: "a fault in toolgap; TOOLGAP_DEBUG=1 shows where",
    Exit.INTERRUPTED: "interrupted",
}

FAILURES: dict[str, str] = {
    "submit": "with `--wait`: as `toolgap wait`",
    "wait": "the operation ended otherwise than restored, or did not end in time",
    "check-prefix": "a turn does not extend the one before it",
    "doctor": "there is a problem",
    "gateway": "it could not listen; its log says why",
    "demo": "an invariant did not hold, or the demo could not be played",
    "bench run": "the run could not go on",
    "bench report": "the folder holds no run",
    "bench figures": "the folder holds no run",
    "bench gateway": "a stream broke or was not equal to the direct one, or the run could not go on",
    "store verify": "a page is damaged, or could not be read",
    "store import": "a page could not be read or written",
    "bench verify": "a run does not agree with its trials",
}
"""What :attr:`Exit.FAILED` says, by command; no other command ends with it."""

URL_VARIABLE = "TOOLGAP_URL"
API_KEY_VARIABLE = "TOOLGAP_API_KEY"
DEBUG_VARIABLE = "TOOLGAP_DEBUG"

P = ParamSpec("P")
T = TypeVar("T")

Url = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="The server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        help="SGLang's admin API key if it has one, else its API key.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SglangArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- SGLANG-ARGUMENTS", help="SGLang's own arguments, after --.", show_default=False
    ),
]


def finite(seconds: float | None) -> float | None:
    """For an option's callback: infinity and what is no number are none of its values."""
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"must be a finite number of seconds, not {seconds}")
    return seconds


def with_options(options: Sequence[inspect.Parameter]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Give a command these options beside its own: it gets them as its ``**`` parameter, by name."""

    def extend(function: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return extend


def client(url: str, api_key: str | None) -> Toolgap:
    """A client of the server that the options name.

    Raises:
        typer.BadParameter: the URL or the key cannot be used.
    """
    try:
        return Toolgap(url, api_key=api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def say(text: str) -> None:
    """Print a sentence for a person."""
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def complain(text: str) -> None:
    """Print a sentence to stderr."""
    Console(file=sys.stderr, highlight=False, soft_wrap=True).print(f"toolgap: {text}", markup=False)


def fail(status: Exit, text: str) -> NoReturn:
    """End the command with a sentence and this status."""
    complain(text)
    raise typer.Exit(status)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def guarded(function: Callable[P, None]) -> Callable[P, None]:
    """A command that ends every error with a sentence and its exit status."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise  # typer's own affairs
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None
        except ToolgapError as refusal:
            fail(Exit.REFUSED, refused(refusal))
        except ToolgapUnreachable as error:
            if error.status_code is None:
                fail(
                    Exit.UNREACHABLE,
                    f"{error}. Is the server up, and is this its URL (--url, {URL_VARIABLE})?",
                )
            fail(Exit.REFUSED if error.status_code in (401, 403) else Exit.UNREACHABLE, str(error))
        except UnicodeEncodeError as error:
            fail(Exit.USAGE, f"an argument is not text: {error}")
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            fail(
                Exit.FAULT,
                f"a fault in toolgap: {type(error).__name__}: {error}. {DEBUG_VARIABLE}=1 shows where; "
                "please report it.",
            )

    return run


def refused(refusal: ToolgapError) -> str:
    """A refusal in a sentence."""
    error = refusal.error
    text = f"the server refused ({refusal.status_code} {error.code}): {error.message}"
    if error.estimate is not None:
        text += f" ({estimated(error.estimate)})"
    return (
        text if error.retry_after_s is None else f"{text}. Worth trying again in {error.retry_after_s:g} s."
    )


def estimated(estimate: Estimate) -> str:
    """An estimate in a phrase."""
    return (
        f"{estimate.missing_tokens} tokens to restore in {estimate.restore_s:.3g} s or to recompute in "
        f"{estimate.recompute_s:.3g} s, {estimate.gap_s:.3g} s before the continuation"
        + ("" if estimate.worthwhile else ": not worthwhile")
    )
