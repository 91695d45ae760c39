"""The gateway as a process: its server, its log, and how it stops."""

import gc
import logging
import sys
from contextlib import ExitStack
from pathlib import Path

import uvicorn

from toolgap.gateway.app import application
from toolgap.gateway.config import Config
from toolgap.gateway.logs import JsonFormatter, expected
from toolgap.gateway.observer import Recorder
from toolgap.gateway.observing import Observer
from toolgap.gateway.recording import Recording

SWITCH_INTERVAL_S = 0.0005
"""How long the observer's thread may keep the streams waiting for Python's interpreter."""


def server(
    config: Config, observer: Observer | None = None, recording: Recorder | None = None
) -> uvicorn.Server:
    """The server, not yet started. On SIGTERM or SIGINT it stops listening, and drains."""
    return uvicorn.Server(
        uvicorn.Config(
            application(config, observer, recording),
            host=config.host,
            port=config.port,
            # Headers are the upstream's, and who asks is whoever connected.
            server_header=False,
            date_header=False,
            proxy_headers=False,
            access_log=False,
            log_config=None,
            ws="none",
            http="httptools",
            loop="uvloop",
            timeout_graceful_shutdown=config.drain_s,
        )
    )


def log_to_stderr(level: int = logging.INFO) -> None:
    """Let everything that is logged be one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(expected)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("httpx", "httpcore"):
        # They log URLs with their queries.
        logging.getLogger(name).setLevel(logging.WARNING)


def run(config: Config, observer: Observer | None = None) -> bool:
    """Serve until a signal stops it.

    Returns:
        Whether it could start; if not, the log says why.

    Raises:
        RecordingError: the file of the recording cannot be used.
    """
    log_to_stderr()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        recording = None
        if config.record is not None:
            recording = stack.enter_context(Recording(Path(config.record), content=config.record_content))
        made = server(config, observer, recording)
        # What is there now stays: looking through all of it again and again would stop every stream for milliseconds.
        gc.collect()
        gc.freeze()
        try:
            made.run()
        except SystemExit:
            return False
    return True
