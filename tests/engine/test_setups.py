"""Servers on which restores cannot work say so; servers that die start clean."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import PAGE, Prompt, Server, until

from toolgap.client import ToolgapUnreachable
from toolgap.protocol import Code, State

pytestmark = pytest.mark.engine


def test_a_server_killed_in_a_restore_starts_clean_and_restores_again(
    model: Path, tmp_path: Path, prompt: Prompt
) -> None:
    """Also: an empty tree after a restart restores what was written to storage before it."""
    prefix = prompt(200 * PAGE)
    with Server(model, tmp_path, spawn=True) as server:
        recomputed = server.store(prefix + [5])
        with server.probe.hold("get") as wait_until_held:
            server.toolgap.submit(input_ids=prefix)
            wait_until_held()
            server.kill()
        server.probe.reset()
        server.start()
        server.state()
        outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
        assert (outcome.state, outcome.read_tokens) == (State.RESTORED, 200 * PAGE)
        answer = server.generate(prefix + [5])
        assert answer.sources == (0, 200 * PAGE, 0)
        assert answer.output_ids == recomputed.output_ids


def test_a_scheduler_killed_in_a_restore_takes_the_server_with_it_and_nobody_hangs(
    model: Path, tmp_path: Path, prompt: Prompt
) -> None:
    prefix = prompt(40 * PAGE)
    with Server(model, tmp_path, spawn=True) as server:
        server.store(prefix + [5])
        with server.probe.hold("get") as wait_until_held, ThreadPoolExecutor() as pool:
            operation_id = server.toolgap.submit(input_ids=prefix).operation_id
            wait_until_held()
            poll = pool.submit(server.toolgap.status, operation_id, 120.0)
            until("the poll waits", lambda: server.state()["waiting_calls"] == 1)
            os.kill(server.state()["scheduler_pid"], signal.SIGKILL)
            with pytest.raises(ToolgapUnreachable):
                poll.result(60.0)
        with pytest.raises(ToolgapUnreachable):
            server.toolgap.overview()


@pytest.mark.parametrize(
    ("arguments", "hierarchical", "names"),
    [
        pytest.param((), False, "--enable-hierarchical-cache", id="no-hicache"),
    ],
)
def test_a_set_up_without_restores(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], hierarchical: bool, names: str
) -> None:
    with Server(model, tmp_path, arguments=arguments, hierarchical=hierarchical) as server:
        for body in ({"action": "submit", "input_ids": [1, 2, 3]}, {"action": "status"}):
            reply = server.call(**body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (501, Code.NOT_SUPPORTED)
            assert names in reply.json()["error"]["message"]


METHOD = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.is_root"


def test_another_release_of_sglang_leaves_the_server_without_the_endpoint(
    model: Path, tmp_path: Path, prompt: Prompt
) -> None:
    """One method with another signature: nothing is registered, the log names it, and SGLang serves as ever."""
    with Server(model, tmp_path, spawn=True, environment={"TOOLGAP_PROBE_CHANGE": METHOD}) as server:
        assert server.call(action="status").status_code == 404
        assert server.generate(prompt(20 * PAGE)).sources == (0, 0, 0)
        assert f"{METHOD}: takes" in server.log.read_text()


def test_a_scheduler_without_hooks_keeps_the_route_shut(model: Path, tmp_path: Path, prompt: Prompt) -> None:
    """The handshake: an order to a scheduler that does not know it would end it."""
    with Server(
        model, tmp_path, spawn=True, environment={"TOOLGAP_PROBE_CHANGE_IN_SCHEDULER": METHOD}
    ) as server:
        reply = server.call(action="submit", input_ids=[1, 2, 3])
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, Code.NOT_SUPPORTED)
        assert "did not announce" in reply.json()["error"]["message"]
        assert server.http.post("/release_memory_occupation", json={}).status_code == 200
        assert server.http.post("/resume_memory_occupation", json={}).status_code == 200
        assert server.generate(prompt(20 * PAGE)).sources == (0, 0, 0)
