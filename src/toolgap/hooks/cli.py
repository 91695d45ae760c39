"""``toolgap hooks``: receivers of hooks that an agent calls over HTTP."""

import importlib.util
import json
from typing import Annotated

import typer

from toolgap.client import DEFAULT_URL
from toolgap.hooks.restores import Restores
from toolgap.terminal import ApiKey, Exit, Json, Url, fail, guarded, say

app = typer.Typer(name="hooks", help="Receive the hooks of agents.", no_args_is_help=True)


@app.callback()
def hooks() -> None:
    """Receive the hooks of agents."""


@app.command("claude-code")
@guarded
def claude_code(
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Where it listens.")] = 30_900,
    host: Annotated[
        str, typer.Option(help="Whom it listens to; this machine only by default.")
    ] = "127.0.0.1",
    only_print: Annotated[
        bool, typer.Option("--print", help="Show what goes into Claude Code's settings.json; start nothing.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Take Claude Code's hooks, and pass its requests on to SGLang.

    Claude Code needs the settings that --print shows.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        fail(Exit.USAGE, f"{' and '.join(missing)} missing: pip install 'toolgap[claude-code]'")
    from toolgap.hooks import claude_code as receiver

    own_url = f"http://{host}:{port}"
    if only_print:
        typer.echo(json.dumps(receiver.settings(own_url), indent=2))
        return
    import uvicorn

    try:
        restores = Restores(url, api_key=api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"url": own_url, "server": url}))
    else:
        say(f"Listening at {own_url}; requests go on to {url}")
    uvicorn.run(receiver.application(restores, url), host=host, port=port, log_level="warning")
