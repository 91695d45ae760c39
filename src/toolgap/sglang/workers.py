"""The HTTP app of a server with several tokenizer workers, with plugins.

SGLang loads no plugins in the processes that uvicorn or granian start for ``--tokenizer-worker-num``
above 1, but lets a variable name the app that they import. The plugin in the server's main process
names this one: it loads the plugins that SGLang loads in its other processes, and is SGLang's own app.
"""

# Before the plugins: whether this module is loaded tells them that the process serves HTTP.
from sglang.srt.entrypoints.http_server import app as app
from sglang.srt.plugins import load_plugins

load_plugins()
