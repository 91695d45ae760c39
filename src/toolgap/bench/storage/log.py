"""A comparison's folder while it is played."""

from pathlib import Path

import msgspec

from toolgap.bench.storage.records import SETUP, TRIALS, Setup, Trial


class Log:
    """A run's folder: trials are appended one by one."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETUP).write_bytes(msgspec.json.format(msgspec.json.encode(setup), indent=1) + b"\n")
        self._file = (folder / TRIALS).open("wb")

    def add(self, trial: Trial) -> None:
        """Append a trial."""
        self._file.write(msgspec.json.encode(trial) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """No more trials."""
        self._file.close()
