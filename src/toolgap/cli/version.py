"""The command that shows releases."""

from importlib import metadata

from toolgap import protocol
from toolgap.terminal import Json, guarded, print_json, say


@guarded
def version(as_json: Json = False) -> None:
    """Show the releases of Toolgap and of SGLang."""
    from toolgap.sglang.internals import SUPPORTED

    own = metadata.version("toolgap")
    try:
        sglang = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        sglang = None
    if as_json:
        print_json(
            {"toolgap": own, "protocol": protocol.VERSION, "sglang": sglang, "supported": list(SUPPORTED)}
        )
        return
    say(f"toolgap {own} (protocol {protocol.VERSION})")
    found = "is not installed" if sglang is None else f"{sglang} is installed"
    say(f"sglang {found}; {', '.join(SUPPORTED)} is supported")
