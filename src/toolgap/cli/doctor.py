"""The command that finds what keeps restores from working."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from toolgap.doctor.answers import ask_server
from toolgap.doctor.arguments import check_arguments
from toolgap.doctor.environment import check_environment
from toolgap.doctor.findings import Finding, Level, has_problem
from toolgap.doctor.installation import check_installation, inspect_installation
from toolgap.doctor.server import check_server
from toolgap.terminal import ApiKey, Exit, Json, SglangArguments, guarded, print_json, say


@guarded
def doctor(
    arguments: SglangArguments = None,
    url: Annotated[
        str | None,
        typer.Option(help="Check this running server, instead of this environment.", show_default=False),
    ] = None,
    api_key: ApiKey = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also check whether a prefix of this length is restored.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find what keeps restores from working, and how to mend it.

    Without options it checks this Python environment.

    With SGLang's arguments after -- also those, before a server is started with them.

    With --url it checks a running server instead.
    """
    if url is not None and arguments:
        raise typer.BadParameter("--url checks a running server: leave SGLang's arguments out")
    if url is None and not arguments and prompt_tokens is not None:
        raise typer.BadParameter("--prompt-tokens needs --url or SGLang's arguments after --")
    if url is None:
        findings = _examine_environment(arguments or (), prompt_tokens)
    else:
        findings = _examine_server(url, api_key, prompt_tokens)
    if as_json:
        print_json(findings)
    else:
        _print_findings(findings)
    if has_problem(findings):
        raise typer.Exit(Exit.FAILED)


def _examine_environment(arguments: Sequence[str], prompt_tokens: int | None) -> list[Finding]:
    from toolgap.sglang.internals.targets import SUPPORTED

    # Bound to the real stderr: what SGLang's modules print meanwhile is dropped.
    with Console(file=sys.stderr).status("Importing SGLang, to check what Toolgap hooks ..."):
        installation = inspect_installation()
    findings = check_installation(installation, SUPPORTED)
    findings += check_environment(os.environ)
    if arguments:
        findings += check_arguments(arguments, prompt_tokens)
    return findings


def _examine_server(url: str, api_key: str | None, prompt_tokens: int | None) -> list[Finding]:
    from toolgap.sglang.internals.targets import SUPPORTED

    try:
        answers = ask_server(url, api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return check_server(answers, SUPPORTED, prompt_tokens)


_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def _print_findings(findings: Sequence[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.meaning)
        if finding.mend is not None:
            text += f"\n[bold]Mend:[/bold] {escape(finding.mend)}"
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.name, text)
    Console(highlight=False).print(table)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    say(f"{problems} problem{'' if problems == 1 else 's'}" if problems else "No problems.")
