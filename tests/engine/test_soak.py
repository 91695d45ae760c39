"""A short soak; ``make soak`` runs it for as long as one likes."""

import os
from pathlib import Path

import pytest
from harness import Server
from soak import ARGUMENTS, ENVIRONMENT, Soak

pytestmark = pytest.mark.engine

FAULTS = ("flush", "fail", "miss", "delay", "hang", "replace", "pause")


def test_nothing_is_lost_and_nothing_hangs(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path, ARGUMENTS, environment=ENVIRONMENT) as server:
        report = Soak(server, seed=0).run(float(os.environ.get("SOAK_S", "120")))
        assert report["problems"] == []
        assert report["unexplained_log_lines"] == []
        counts = report["counts"]
        for done in ("submit", "generate", *(f"fault: {fault}" for fault in FAULTS)):
            assert counts[done]
