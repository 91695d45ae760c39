"""The command ``toolgap``: what commands there are.

What a person reads goes to stdout as text, with ``--json`` as JSON; complaints go to stderr. Nothing in this package
knows more than the modules it calls: it reads options, prints, and chooses the exit status.
"""

import typer

from toolgap.bench.cli import app as bench
from toolgap.cli import demo, doctor, gateway, operations, serve, store, version, watch
from toolgap.hooks.cli import app as hooks
from toolgap.prefixes.cli import check_prefix
from toolgap.terminal import EXITS

app = typer.Typer(
    name="toolgap",
    help="Restore an agent's KV cache while its tool call runs, on stock SGLang.",
    epilog="\n".join(["Exit status:", *(f"{status.value:>3}  {text}" for status, text in EXITS.items())]),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = (
    operations.submit,
    operations.resolve,
    operations.status,
    operations.wait,
    operations.cancel,
    watch.watch,
    check_prefix,
    serve.serve,
    gateway.gateway,
    doctor.doctor,
    demo.demo,
    version.version,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(bench)
app.add_typer(hooks)
app.add_typer(store.app)
