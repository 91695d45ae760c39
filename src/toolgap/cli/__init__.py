"""The command ``toolgap``: what commands there are.

What a person reads goes to stdout as text, with ``--json`` as JSON; complaints go to stderr. Nothing in this package
knows more than the modules it calls: it reads options, prints, and chooses the exit status.
"""

import typer

from toolgap.bench.cli import app as bench
from toolgap.cli.demo import demo
from toolgap.cli.doctor import doctor
from toolgap.cli.operations import cancel, resolve, status, submit, wait
from toolgap.cli.serve import serve
from toolgap.cli.version import version
from toolgap.cli.watch import watch
from toolgap.terminal import EXITS

app = typer.Typer(
    name="toolgap",
    help="Restore an agent's KV cache while its tool call runs, on stock SGLang.",
    epilog="\n".join(["Exit status:", *(f"{status.value:>3}  {text}" for status, text in EXITS.items())]),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (submit, resolve, status, wait, cancel, watch, serve, doctor, demo):
    app.command()(command)
app.add_typer(bench)
app.command()(version)
