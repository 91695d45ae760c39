"""A page in headless Chromium: what its scripts made of it, what its console said, and a picture of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LONGEST_S = 120.0

OPTIONS = (
    "--headless=new",
    # It only ever opens our own page, and in CI it is run by root, for whom Chromium has no sandbox.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--enable-logging=stderr",
    # Whatever the page asks of another host fails, and the console says so.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] (.*)")


class Seen(NamedTuple):
    """A page as it is after a while."""

    dom: str
    console: list[str]


class BrowserError(RuntimeError):
    """Chromium did not do as it was told; the text has the end of what it said."""


def find() -> str | None:
    """Chromium on this system."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def look(
    program: str,
    url: str,
    *,
    after_s: float = 3.0,
    picture: Path | None = None,
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
) -> Seen:
    """Open a page and look at it.

    Args:
        program: From :func:`find`.
        url: On 127.0.0.1; other hosts are not reached.
        after_s: Seconds of the page's own time, which runs as fast as nothing is waited for.
        picture: Where a PNG goes. The DOM is empty then.
        width, height: Of the window, in pixels.
        dark: Whether it is said to prefer dark.

    Raises:
        BrowserError: It failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="toolgap-browser-", ignore_cleanup_errors=True) as profile:
        command = [
            program,
            *OPTIONS,
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={round(after_s * 1000)}",
            f"--window-size={width},{height}",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            f"--screenshot={picture}" if picture else "--dump-dom",
            url,
        ]
        variables = {**os.environ, "TZ": "UTC", "HOME": profile}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            dom, log = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise BrowserError(f"{program} did not end within {LONGEST_S:g} s") from None
        finally:
            _end_group(process)
    if process.returncode or (picture and not picture.exists()):
        raise BrowserError(f"{program} ended with {process.returncode}:\n{log[-2000:]}")
    return Seen(dom, CONSOLE.findall(log))


def _end_group(process: subprocess.Popen[str]) -> None:
    """End Chromium's helpers with it, also when we are interrupted."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
