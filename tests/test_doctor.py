"""What the doctor finds in plain values; what a server really answers is in tests/engine."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from samples import ENGINE
from toolgap.client import ToolgapUnreachable
from toolgap.doctor.answers import ServerAnswers, ask_server
from toolgap.doctor.arguments import check_arguments
from toolgap.doctor.environment import check_environment
from toolgap.doctor.findings import Finding, Level
from toolgap.doctor.installation import Installation, check_installation
from toolgap.doctor.prompt import check_prompt, read_threshold
from toolgap.doctor.server import check_server
from toolgap.doctor.store import StorePlace, check_store, inspect_store
from toolgap.protocol import VERSION, Code, Error, ErrorReply, Overview
from toolgap.sglang.plugin import APP_PATH, APP_PATH_VARIABLE
from toolgap.store.config import StoreConfig
from toolgap.store.config import arguments as store_arguments

SUPPORTED = ("0.5.23",)

SOUND: dict[str, Any] = {
    "version": "0.5.23",
    "frontend": "python",
    "toolgap": {"protocol": VERSION, "missing": []},
    "tokenizer_worker_num": 1,
    "enable_hierarchical_cache": True,
    "disable_radix_cache": False,
    "hicache_host_memory_mode": "cache",
    "hicache_storage_backend": "file",
    "hicache_write_policy": "write_through",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "disaggregation_mode": "null",
    "enable_pd_role_switch": False,
    "speculative_algorithm": None,
    "api_key": None,
    "admin_api_key": "secret-of-the-admin",
}


def overview(**changes: Any) -> Overview:
    return Overview(active=[], recent=[], engine=msgspec.structs.replace(ENGINE, **changes))


def answers(info: dict[str, Any] | None = None, **changes: Any) -> ServerAnswers:
    values: dict[str, Any] = {
        "url": "http://server:1",
        "info_status": 200,
        "info": SOUND | (info or {}),
        "endpoint_status": 200,
        "overview": overview(),
        "error": None,
    }
    return ServerAnswers(**{**values, **changes})


def refused(status: int, code: Code, message: str) -> dict[str, Any]:
    return {"endpoint_status": status, "overview": None, "error": Error(code=code, message=message)}


def problems(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.level is Level.PROBLEM}


def named(findings: list[Finding], name: str) -> Finding:
    [finding] = [finding for finding in findings if finding.name == name]
    return finding


def check(prompt_tokens: int | None = None, **changes: Any) -> list[Finding]:
    return check_server(answers(**changes), SUPPORTED, prompt_tokens)


# ---- this environment ----


def test_a_sound_installation() -> None:
    found = check_installation(Installation("0.5.23", [], ["toolgap", "toolgap_cpu"]), SUPPORTED)
    assert [finding.level for finding in found] == [Level.OK] * 3


@pytest.mark.parametrize(
    ("installation", "expected"),
    [
        (Installation(None, [], ["toolgap"]), {"sglang-release"}),
        (Installation("0.5.24", ["sglang 0.5.24 is installed"], ["toolgap"]), {"sglang-release"}),
        (Installation("0.5.23", ["a.b: takes x, not y", "c: no d"], ["toolgap"]), {"hooks"}),
        (Installation("0.5.23", [], ["other"]), {"entry-point"}),
    ],
)
def test_installations_on_which_toolgap_is_off(installation: Installation, expected: set[str]) -> None:
    found = check_installation(installation, SUPPORTED)
    assert problems(found) == expected
    assert all(finding.mend for finding in found if finding.level is Level.PROBLEM)


def test_every_hook_that_does_not_fit_is_named() -> None:
    found = check_installation(Installation("0.5.23", ["a: is x", "b: is y"], ["toolgap"]), SUPPORTED)
    assert [f.meaning[:6] for f in found if f.name == "hooks"] == ["a: is ", "b: is "]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, set()),
        ({"SGLANG_PLUGINS": ""}, set()),
        ({"SGLANG_PLUGINS": "other, toolgap"}, set()),
        ({"SGLANG_PLUGINS": "other"}, {"plugin-list"}),
        ({"SGLANG_PLUGINS": "toolgap", "TOOLGAP_CPU": "1"}, {"plugin-list"}),
        ({"TOOLGAP_MAX_OPERATIONS": "0"}, {"settings"}),
        ({"SGLANG_RUST_SERVER": "0"}, set()),
        ({"SGLANG_RUST_SERVER": "Yes"}, {"http-server"}),
        ({"TOOLGAP_URL": "http://x", "TOOLGAP_API_KEY": "k", "TOOLGAP_CPU": "1"}, set()),
    ],
)
def test_environments(environ: dict[str, str], expected: set[str]) -> None:
    assert problems(check_environment(environ)) == expected


def test_a_variable_that_is_nearly_a_setting_is_noted() -> None:
    found = check_environment({"TOOLGAP_MAX_OPERATION": "1", "TOOLGAP_CPU": "1", "TOOLGAP_URL": "x"})
    [note] = [finding for finding in found if finding.level is Level.NOTE]
    assert "TOOLGAP_MAX_OPERATION." in note.meaning
    assert "TOOLGAP_MAX_OPERATIONS?" in str(note.mend)


def test_an_app_of_the_operators_own_is_noted() -> None:
    own = check_environment({APP_PATH_VARIABLE: "my.server:app"})
    [note] = [finding for finding in own if finding.level is Level.NOTE]
    assert "my.server:app" in note.meaning
    assert "toolgap.sglang.workers" in str(note.mend)
    assert check_environment({APP_PATH_VARIABLE: APP_PATH}) == check_environment({})


# ---- arguments ----

HICACHE = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (HICACHE, set()),
        (["--enable-hicache", "--hicache-storage-backend=file"], set()),
        (["--enable-hier", "--hicache-storage-backend=file", "--attn-cp-si", "2"], {"parallelism"}),
        ([], {"hierarchical-cache", "storage-backend"}),
        (["--enable-hierarchical-cache"], {"storage-backend"}),
        ([*HICACHE, "--hicache-host-memory-mode", "buffer_only"], {"host-memory-mode"}),
        ([*HICACHE, "--tokenizer-worker-num", "2"], set()),
        ([*HICACHE, "--disable-radix-cache"], {"radix-cache"}),
        ([*HICACHE, "--data-parallel-size=2", "--pp-size", "2", "--tp", "2"], set()),
        ([*HICACHE, "--attn-dp-size", "2", "--tp", "2"], set()),
        ([*HICACHE, "--attn-cp-size", "2", "--tp", "2"], {"parallelism"}),
        ([*HICACHE, "--decode-context-parallel-size=2", "--tp", "2"], {"parallelism"}),
        ([*HICACHE, "--disaggregation-mode", "prefill"], set()),
        ([*HICACHE, "--disaggregation-mode", "decode"], {"disaggregation"}),
        ([*HICACHE, "--disaggregation-mode=prefill", "--enable-pd-role-switch"], {"disaggregation"}),
        ([*HICACHE, "--speculative-algorithm", "EAGLE3"], {"speculation"}),
        ([*HICACHE, "--speculative-algorithm", "NGRAM"], set()),
        ([*HICACHE, "--enable-lmcache"], {"cache"}),
        ([*HICACHE, "--grpc-mode"], {"http-server"}),
        ([*HICACHE, "--use-ray"], {"schedulers"}),
        ([*HICACHE, "--tp-size", "two"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend-extra-config", "{"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend-extra-config", "[]"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend-extra-config", "@/no/such.json"], {"arguments"}),
        ([*HICACHE, "--model-path", "m", "--port", "1", "--unknown", "--tp-like"], set()),
    ],
)
def test_arguments(arguments: list[str], expected: set[str]) -> None:
    found = check_arguments(arguments)
    assert problems(found) == expected
    assert all(finding.mend for finding in found if finding.level is not Level.OK)


def test_without_the_hierarchical_cache_its_other_arguments_are_not_judged() -> None:
    names = {finding.name for finding in check_arguments(["--hicache-write-policy", "write_back"])}
    assert names.isdisjoint({"host-memory-mode", "write-policy"})


def test_a_late_write_policy_is_noted() -> None:
    found = check_arguments([*HICACHE, "--hicache-write-policy", "write_back"])
    assert named(found, "write-policy").level is Level.NOTE


def test_what_several_tokenizer_workers_leave_open_is_noted() -> None:
    note = named(check_arguments([*HICACHE, "--tokenizer-worker-num", "2"]), "tokenizer-workers")
    assert note.level is Level.NOTE
    assert "2 tokenizer workers" in note.meaning


def test_a_config_file_is_not_read_and_that_is_said() -> None:
    found = check_arguments([*HICACHE, "--config", "server.yaml"])
    assert "server.yaml" in named(found, "arguments").meaning


@pytest.mark.parametrize(
    ("prompt_tokens", "page", "config", "sound"),
    [
        (256, 16, None, True),
        (255, 16, None, False),
        (271, 64, None, True),
        (319, 64, None, True),
        (255, 64, None, False),
        (64, 16, '{"prefetch_threshold": 64}', True),
        (63, 16, '{"prefetch_threshold": 64}', False),
        (127, 128, '{"prefetch_threshold": 64}', False),
        (128, 128, '{"prefetch_threshold": 64}', True),
    ],
)
def test_prompts_against_the_threshold(
    prompt_tokens: int, page: int, config: str | None, *, sound: bool
) -> None:
    arguments = [*HICACHE, "--page-size", str(page)]
    if config is not None:
        arguments += ["--hicache-storage-backend-extra-config", config]
    assert (problems(check_arguments(arguments, prompt_tokens)) == set()) is sound


def test_the_threshold_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"prefetch_threshold": 64}')
    (tmp_path / "c.toml").write_text("prefetch_threshold = 32\n")
    assert read_threshold(f"@{tmp_path}/c.json") == 64
    assert read_threshold(f"@{tmp_path}/c.toml") == 32
    assert read_threshold(f"@{tmp_path}/c.yaml") is None
    assert read_threshold('{"other": 1}') == 256
    with pytest.raises(ValueError, match="whole number"):
        read_threshold('{"prefetch_threshold": "64"}')


def test_the_mend_of_a_short_prompt_is_a_threshold_that_restores_it() -> None:
    mend = str(check_prompt(100, 256, 16).mend)
    config = mend[mend.index("{") : mend.index("}") + 1]
    assert check_prompt(100, json.loads(config)["prefetch_threshold"], 16).level is Level.OK


# ---- a running server ----


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


# ---- asking ----


def test_asking_a_server() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer key"
        if request.url.path == "/server_info":
            return httpx.Response(200, json=SOUND)
        return httpx.Response(200, content=msgspec.json.encode(overview()))

    got = ask_server("http://server:1", "key", httpx.MockTransport(handler))
    assert got == answers()


def test_asking_a_server_that_refuses() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(401, json={"error": "Unauthorized"})
        reply = ErrorReply(error=Error(code=Code.NOT_SUPPORTED, message="why"))
        return httpx.Response(501, content=msgspec.json.encode(reply))

    got = ask_server("http://server:1", None, httpx.MockTransport(handler))
    assert got == ServerAnswers(
        "http://server:1", 401, None, 501, None, Error(code=Code.NOT_SUPPORTED, message="why")
    )


def test_asking_what_is_no_sglang_server() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, html="<p>hello</p>")

    got = ask_server("http://server:1", None, httpx.MockTransport(handler))
    assert (got.info_status, got.info, got.endpoint_status, got.overview) == (200, None, 200, None)


def test_asking_nobody() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ToolgapUnreachable, match="refused"):
        ask_server("http://server:1", None, httpx.MockTransport(handler))


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_a_store_is_found_in_sglangs_arguments(tmp_path: Path) -> None:
    config = StoreConfig(path=str(tmp_path / "kv"), limit_bytes=1 << 30)
    found = check_arguments(["--enable-hierarchical-cache", *store_arguments(config)])
    (store,) = [finding for finding in found if finding.name == "store"]
    assert store.level == Level.OK
    assert "at most 1.0 GiB" in store.meaning
    assert "store-limit" not in levels(found)
    assert inspect_store('{"class_name": "Another"}') is None
    unknown = check_arguments(["--hicache-storage-backend-extra-config", '{"class_name": "ToolgapStore"}'])
    assert "no folder is named" in unknown[0].meaning


def test_what_a_store_lacks() -> None:
    place = StorePlace(Path("/disk/kv"), None, reads_in_place=False, has_xxhash=False, free_bytes=None)
    found = levels(check_store(place))
    assert found == {
        "store-packages": Level.PROBLEM,
        "store-interface": Level.NOTE,
        "store": Level.PROBLEM,
    }
    assert levels(check_store(place._replace(has_xxhash=True, free_bytes=1 << 40, reads_in_place=True))) == {
        "store": Level.OK,
        "store-limit": Level.NOTE,
    }
