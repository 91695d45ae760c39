"""What the doctor says of a running server's answers; what a real one answers is in tests/engine."""

from typing import Any

import pytest
from doctor_samples import SUPPORTED, answers, named, overview, problems

from toolgap.doctor.answers import ServerAnswers
from toolgap.doctor.findings import Finding, Level
from toolgap.doctor.server import check_server
from toolgap.protocol import VERSION, Code, Error


def refused(status: int, code: Code, message: str) -> dict[str, Any]:
    return {"endpoint_status": status, "overview": None, "error": Error(code=code, message=message)}


def check(prompt_tokens: int | None = None, **changes: Any) -> list[Finding]:
    return check_server(answers(**changes), SUPPORTED, prompt_tokens)


def test_a_sound_server() -> None:
    found = check(prompt_tokens=1000)
    assert {finding.level for finding in found} == {Level.OK}
    assert "secret-of-the-admin" not in str(found)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"version": "0.5.24"}, {"sglang-release"}),
        ({"frontend": "rust"}, {"http-server"}),
        ({"toolgap": {"protocol": VERSION + 1}}, {"toolgap-release"}),
        ({"tokenizer_worker_num": 4}, set()),
        ({"enable_hierarchical_cache": False}, {"hierarchical-cache"}),
        ({"hicache_host_memory_mode": "buffer_only"}, {"host-memory-mode"}),
    ],
)
def test_what_the_servers_arguments_say(info: dict[str, Any], expected: set[str]) -> None:
    assert problems(check(info=info)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"storage_backend": None, "prefetch_capacity_tokens": 0}, {"storage-backend"}),
        ({"prefetch_capacity_tokens": 0}, {"prefetch-capacity"}),
        ({"stalled_reads": 1}, {"storage-reads"}),
        ({"paused": True}, set()),
        ({"prefetch_threshold_tokens": 1025}, {"prompt"}),
        ({"page_tokens": 1024}, {"prompt"}),
        ({"max_operation_tokens": 512}, {"prompt"}),
    ],
)
def test_what_the_engine_says(changes: dict[str, Any], expected: set[str]) -> None:
    assert problems(check(prompt_tokens=1000, overview=overview(**changes))) == expected


def test_a_backend_that_was_attached_later_counts() -> None:
    assert problems(check(info={"hicache_storage_backend": None})) == set()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (refused(501, Code.NOT_SUPPORTED, "the reason"), "the reason"),
        (refused(503, Code.ENGINE_BUSY, "no answer"), "prefill"),
        ({"endpoint_status": 404, "overview": None}, "not loaded"),
        ({"endpoint_status": 401, "overview": None}, "API key"),
        ({"endpoint_status": 200, "overview": None}, "release"),
        ({"endpoint_status": 502, "overview": None}, "502"),
    ],
)
def test_an_endpoint_that_gives_no_overview(changes: dict[str, Any], says: str) -> None:
    found = check(**changes)
    assert problems(found) == {"endpoint"}
    assert says in named(found, "endpoint").meaning
    assert named(found, "endpoint").mend


@pytest.mark.parametrize(
    ("keys", "level", "says"),
    [
        ({"api_key": None, "admin_api_key": None}, Level.NOTE, "everyone"),
        ({"api_key": "secret", "admin_api_key": None}, Level.OK, "server's API key"),
        ({"api_key": "secret", "admin_api_key": "secret"}, Level.OK, "admin"),
    ],
)
def test_which_key_the_endpoint_wants(keys: dict[str, str | None], level: Level, says: str) -> None:
    finding = named(check(info=keys), "api-key")
    assert finding.level is level
    assert says in finding.meaning
    assert "secret" not in finding.meaning


def test_arguments_that_another_key_guards_are_noted() -> None:
    found = check_server(answers()._replace(info_status=401, info=None), SUPPORTED)
    assert problems(found) == set()
    assert named(found, "server-info").level is Level.NOTE


def test_what_is_no_sglang_server() -> None:
    found = check_server(ServerAnswers("http://server:1", 404, None, 404, None, None), SUPPORTED)
    assert problems(found) == {"server-info", "endpoint"}
