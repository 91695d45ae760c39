"""What the cpu profile adds to SGLang keeps its answers, in the layout that no other test runs."""

from pathlib import Path

import pytest
from harness import PAGE, Prompt, Server

pytestmark = pytest.mark.engine


def test_kv_survives_every_tier_in_page_first(model: Path, tmp_path: Path, prompt: Prompt) -> None:
    # Longer than L1 with the second prompt, so that the first one goes to L2 and comes back.
    first, second = prompt(300 * PAGE + 1), prompt(300 * PAGE + 1)
    with Server(model, tmp_path, arguments=("--hicache-mem-layout", "page_first")) as server:
        cold = server.generate(first)
        assert cold.sources == (0, 0, 0)
        device = server.generate(first)
        assert device.sources == (300 * PAGE, 0, 0)
        server.generate(second)
        host = server.generate(first)
        assert host.host_tokens > 0
        assert host.storage_tokens == 0
        server.flush()
        storage = server.generate(first)
        assert storage.sources == (0, 0, 300 * PAGE)
        assert cold.output_ids == device.output_ids == host.output_ids == storage.output_ids
