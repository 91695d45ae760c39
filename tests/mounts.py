"""Disks of a test's own: what is mounted is seen by one command and its children alone, and goes with them."""

import subprocess
from pathlib import Path

import pytest

_APART = ("unshare", "--user", "--map-root-user", "--mount")


def apart(folder: Path) -> list[str]:
    """What runs a command that may mount on a folder; skips the test where nothing may."""
    try:
        may = subprocess.run(
            [*_APART, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, timeout=60, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if may.returncode:
        pytest.skip("this machine lets no process mount, in a name space of its own either")
    return list(_APART)
