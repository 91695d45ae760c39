import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PATIENT, Prompt, Server

from toolgap.cpu.model import build_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def shared_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    environment = {
        **PATIENT,
        "TOOLGAP_MAX_OPERATIONS": "4",
        "TOOLGAP_MAX_BODY_BYTES": "200000",
    }
    with Server(model, tmp_path_factory.mktemp("shared"), environment=environment) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server with an empty cache; afterwards everything is back where it was."""
    with shared_server.left_as_found():
        yield shared_server


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompt:
    """Makes prompts that no other test uses: token ids of the given number."""
    generator = random.Random(request.node.nodeid)

    def make(tokens: int) -> list[int]:
        return [generator.randrange(100, 40_000) for _ in range(tokens)]

    return make
