"""``python -m toolgap`` is the command ``toolgap``."""

from toolgap.cli import app

app(prog_name="toolgap")
