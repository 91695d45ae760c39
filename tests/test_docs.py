"""What the documents say exists: generated pages are current, and names, flags and examples are real."""

import ast
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from typer.main import get_command

import docs
from toolgap.cli import app
from toolgap.client import AsyncToolgap, Toolgap
from toolgap.gateway import config as gateway
from toolgap.gateway.hints import Hint
from toolgap.gateway.metrics import Metrics
from toolgap.gateway.observing import Ending
from toolgap.gateway.record import Recorded
from toolgap.gateway.recording import Recording
from toolgap.gateway.refusals import Refusal
from toolgap.prefixes.causes import Cause
from toolgap.protocol import (
    PATH,
    UNSUPPORTED_FIELDS,
    Code,
    Command,
    Divergence,
    EngineStatus,
    Error,
    ErrorReply,
    Estimate,
    OperationStatus,
    Overview,
    Reason,
    Resolved,
    State,
    Submit,
    decode_command,
)
from toolgap.restoring import AsyncRestoring, Restoring
from toolgap.settings import PREFIX, Settings, variable
from toolgap.sglang.internals import targets
from toolgap.sglang.metrics import PREFIX as METRIC_PREFIX
from toolgap.sglang.metrics import Metric
from toolgap.store.config import StoreConfig
from toolgap.store.identity import DECISIVE
from toolgap.store.metrics import DEFINITIONS as STORE_METRICS
from toolgap.store.metrics import LABELS
from toolgap.store.stats import StoreStats
from toolgap.terminal import FAILURES, Exit

ROOT = docs.ROOT
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
RESTORING = {
    *(name for name in dir(AsyncRestoring) if not name.startswith("_")),
    *re.findall(r"^    (\w+): ", inspect.getdoc(Restoring.__base__) or "", re.MULTILINE),
}
"""What a handle of ``restoring`` has."""
REPLIES = (OperationStatus, Estimate, Divergence, Overview, EngineStatus, Resolved, Error)
SGLANGS_METRICS = {"sglang:prefetch_bandwidth", "sglang:backup_bandwidth"}

EVERY_DOCUMENT = pytest.mark.parametrize("name", DOCUMENTS)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code_of(text: str) -> Iterator[str]:
    """Everything that is set as code: fenced blocks and spans."""
    yield from re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def sources(*folders: str) -> str:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in (".py", "") and "__pycache__" not in path.parts
    )


def sglang_source(*names: str) -> str:
    """Text of files of the installed SGLang, which is not imported: that takes seconds."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    return "\n".join(path.read_text(encoding="utf-8") for name in names for path in sorted(root.glob(name)))


# ---- the generated pages ----


def test_generated_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_or_missing_page_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"], tmp_path) == 1
    assert docs.main([], tmp_path) == 0
    assert docs.main(["--check"], tmp_path) == 0
    capsys.readouterr()
    page = tmp_path / "docs" / "http.md"
    page.write_text(page.read_text() + "By hand.\n")
    assert docs.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err == "docs/http.md is stale: run scripts/docs.py\n"


def test_the_http_reference_names_everything_of_the_protocol() -> None:
    page = DOCUMENTS["docs/http.md"]
    structs = [*get_args(Command), *REPLIES]
    names = [*State, *Reason, *Code, *(name for struct in structs for name in struct.__struct_fields__)]
    assert [name for name in names if f"| `{name}` |" not in page and f" `{name}` |" not in page] == []


def test_the_metrics_page_names_every_metric_and_alert() -> None:
    page = DOCUMENTS["docs/metrics.md"]
    assert re.findall(r"^\| `(sglang:\w+)` \| (?:counter|gauge|histogram)", page, re.MULTILINE) == [
        metric.value.name for metric in Metric
    ]
    rules = (ROOT / "observability" / "alerts.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Toolgap\w+)`", page, re.MULTILINE) == re.findall(r"alert: (\w+)", rules)


def test_the_stores_metrics_are_all_named() -> None:
    page = DOCUMENTS["docs/store-in-a-server.md"]
    assert [metric.name for metric in STORE_METRICS if f"`{metric.name}`" not in page] == []


@EVERY_DOCUMENT
def test_every_metric_exists(name: str) -> None:
    for found in set(re.findall(r"\bsglang:\w+", DOCUMENTS[name])):
        known = {*(metric.value.name for metric in Metric), *(metric.name for metric in STORE_METRICS)}
        assert found in {METRIC_PREFIX, *known, *SGLANGS_METRICS}, found


def test_the_settings_page_names_every_variable() -> None:
    page = DOCUMENTS["docs/settings.md"]
    assert re.findall(r"^\| `(TOOLGAP_\w+)`", page, re.MULTILINE) == [
        variable(f.name) for f in fields(Settings)
    ]


def test_the_command_line_page_names_every_command_and_exit_status() -> None:
    page = DOCUMENTS["docs/cli.md"]
    leaves = dict(docs.leaf_commands(get_command(app)))
    assert [name for name in leaves if f"## toolgap {name}\n" not in page] == []
    assert re.findall(r"^\| `(\d+)` \|", page, re.MULTILINE) == [str(status.value) for status in Exit]
    assert leaves.keys() >= FAILURES.keys()


def test_every_command_speaks_json() -> None:
    leaves = dict(docs.leaf_commands(get_command(app)))
    assert [name for name, command in leaves.items() if "--json" not in flags(command)] == []


# ---- examples ----


@EVERY_DOCUMENT
def test_every_request_in_an_example_is_accepted(name: str) -> None:
    text = DOCUMENTS[name]
    bodies = re.findall(r"-d '(.*?)'", text, re.DOTALL)
    if name == "docs/gateway.md":
        hints = [msgspec.json.decode(body, type=Hint) for body in bodies]
        assert all(hint.tool_call_id or hint.session_ended for hint in hints)
        return
    assert all(isinstance(decode_command(body.encode()), Command) for body in bodies)
    if name in ("README.md", "docs/http.md"):
        assert {json.loads(body)["action"] for body in bodies} >= {"submit", "status"}


@EVERY_DOCUMENT
def test_every_reply_in_an_example_is_one(name: str) -> None:
    for block in blocks(DOCUMENTS[name], "json"):
        if name == "docs/recordings.md":
            line = msgspec.json.decode(block)
            assert msgspec.to_builtins(msgspec.convert(line, Recorded)) == line
            continue
        kinds = [OperationStatus, Overview, Resolved, ErrorReply]
        keys = msgspec.json.decode(block, type=dict[str, Any]).keys()
        kind = next(kind for kind in kinds if set(kind.__struct_fields__) == keys)
        reply = msgspec.json.decode(block, type=kind)
        for status in [reply] if isinstance(reply, OperationStatus) else getattr(reply, "recent", []):
            assert status.state.terminal == (status.reason is not None)
            assert status.aligned_tokens % docs.PAGE_TOKENS == 0
            assert status.read_tokens == status.inserted_tokens + status.dropped_tokens


@EVERY_DOCUMENT
def test_the_client_in_an_example_has_what_is_used(name: str) -> None:
    for block in blocks(DOCUMENTS[name], "python"):
        for node in ast.walk(ast.parse(block)):
            match node:
                case ast.Attribute(value=ast.Name("restore"), attr=attribute):
                    assert attribute in RESTORING
                case ast.Attribute(value=ast.Name("toolgap"), attr=attribute):
                    assert callable(getattr(Toolgap, attribute))
                    assert callable(getattr(AsyncToolgap, attribute))
                case ast.Attribute(value=ast.Name("operation" | "outcome"), attr=attribute):
                    assert attribute in OperationStatus.__struct_fields__
                case ast.Call(func=ast.Attribute(attr="submit" | "restoring"), keywords=keywords):
                    own = {"retry_for_s", "strict"}
                    assert {keyword.arg for keyword in keywords} <= {*Submit.__struct_fields__, *own}
                case ast.ImportFrom(module=module, names=names):
                    assert module is not None
                    assert module == "toolgap.client" or module.startswith("toolgap.hooks.")
                    source = (ROOT / "src" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
                    assert all(f"class {alias.name}" in source for alias in names)


# ---- names ----


@EVERY_DOCUMENT
def test_every_variable_exists(name: str) -> None:
    known = {variable(field.name) for field in fields(Settings)}
    known |= {gateway.variable(field.name) for field in gateway.FIELDS} | {gateway.FILE_VARIABLE}
    others = sources("src", "scripts")
    for found in set(re.findall(rf"\b{PREFIX}\w*", DOCUMENTS[name])) - {PREFIX}:
        assert found in known or f'"{found}"' in others, found


@EVERY_DOCUMENT
def test_every_flag_exists(name: str) -> None:
    used = {
        flag for text in code_of(DOCUMENTS[name]) for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)
    }
    own = {flag for command in commands().values() for flag in command} | flags(get_command(app)) | {"--help"}
    if missing := used - own:
        arguments = sglang_source("srt/arg_groups/fields/*.py")
        theirs = {
            f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): A\[", arguments, re.MULTILINE)
        }
        assert missing <= theirs | set(re.findall(r'"(--[a-z-]+)"', arguments + sources("scripts")))


def commands() -> dict[str, set[str]]:
    """Subcommands of ``toolgap`` and their options; a group has those of all its commands."""
    group: Any = get_command(app)
    return {name: flags(command) for name, command in group.commands.items()}


def flags(command: Any) -> set[str]:
    own = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    return own.union(*(flags(one) for one in getattr(command, "commands", {}).values()))


@EVERY_DOCUMENT
def test_every_command_exists(name: str) -> None:
    for text in code_of(DOCUMENTS[name]):
        for command in re.findall(r"^toolgap (?!is off)([a-z][\w-]*)", text, re.MULTILINE):
            assert command in commands()


@EVERY_DOCUMENT
def test_every_route_exists(name: str) -> None:
    found = {
        path
        for text in code_of(DOCUMENTS[name])
        for path in re.findall(r"(?:(?:GET|POST|PUT|DELETE) |:30000|^)(/[a-z0-9_/-]+)", text)
    }
    if name == "docs/gateway.md":
        found = {path for path in found if f'"{path}"' not in sources("src/toolgap/gateway")}
    if unknown := found - {PATH, "/hicache/"}:
        server = sglang_source("srt/entrypoints/http_server.py", "srt/utils/common.py")
        assert [path for path in unknown if f'"{path}"' not in server] == []


@EVERY_DOCUMENT
def test_every_file_exists(name: str) -> None:
    for text in code_of(DOCUMENTS[name]):
        for path in re.findall(r"(?<![\w/.-])(?:src|docs|scripts|tests|requirements)/[\w./-]*", text):
            assert (ROOT / path).exists(), path


@EVERY_DOCUMENT
def test_every_word_of_the_protocol_is_spelled_as_it_is(name: str) -> None:
    """A reason, code or field that is renamed must not live on in a document."""
    structs = [*get_args(Command), *REPLIES]
    known = {*State, *Reason, *Code, *Cause, *UNSUPPORTED_FIELDS, "api_key", "retry_for_s", "timeout_s"}
    known |= RESTORING
    known |= {field for struct in structs for field in struct.__struct_fields__}
    sglangs = {
        "write_through",
        "buffer_only",
        "best_effort",
        "wait_complete",
        "prefetch_threshold",
        "cache_aware",
    }
    if name in ("docs/store.md", "docs/store-in-a-server.md"):
        known |= {*StoreConfig.__struct_fields__, *StoreStats.__struct_fields__, *DECISIVE, *LABELS}
        known |= {"page_first", "page_first_direct", "layer_first"}
    if name == "docs/agents.md":
        known |= set(re.findall(r"\w+", sources("src/toolgap/hooks")))
    if name in ("docs/gateway.md", "docs/recordings.md"):
        known |= set(re.findall(r"\w+", sources("src/toolgap/gateway")))
        known |= gateway_metrics()
    spans = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", DOCUMENTS[name])
    assert set(spans) - known - sglangs == set()


def gateway_metrics() -> set[str]:
    metrics = Metrics(("http://127.0.0.1:30000",))
    with tempfile.NamedTemporaryFile() as file, Recording(Path(file.name), content=False) as recording:
        metrics.show_recording(recording)
    registry = metrics.registry
    return {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in registry.collect()
    }


def test_the_gateways_page_names_every_metric_code_and_ending() -> None:
    page = DOCUMENTS["docs/gateway.md"]
    assert set(re.findall(r"`(toolgap_gateway_\w+)`", page)) == gateway_metrics()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted((str(one.value.status), one.value.code) for one in Refusal)
    assert [ending for ending in Ending if ending is not Ending.UNSEEN and f"`{ending}`" not in page] == []


def test_every_reason_is_explained_by_what_happened() -> None:
    page = DOCUMENTS["docs/how-it-works.md"]
    assert [reason for reason in Reason if f"`{reason}`" not in page] == []


def test_the_supported_releases_are_named() -> None:
    for name in ("README.md", "docs/limits.md"):
        assert all(release in DOCUMENTS[name] for release in targets.SUPPORTED)
    assert set(re.findall(r"\b0\.5\.\d+\b", "".join(DOCUMENTS.values()))) == set(targets.SUPPORTED)


# ---- tables that repeat the source ----


def test_the_hooks_table_is_complete() -> None:
    plugin = (ROOT / "src" / "toolgap" / "sglang" / "plugin.py").read_text(encoding="utf-8")
    hooked = {
        (".".join(target.split(".")[-2:]), kind)
        for constant, kind in re.findall(r'Hook\(targets\.(\w+), "(\w+)"', plugin)
        for target in [getattr(targets, constant)]
    }
    assert '*(Hook(target, "around", hooks.update_weights) for target in targets.UPDATE_WEIGHTS)' in plugin
    hooked |= {(".".join(target.split(".")[-2:]), "around") for target in targets.UPDATE_WEIGHTS}
    assert len(hooked) == plugin.count("Hook(targets.") + len(targets.UPDATE_WEIGHTS)
    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| (after|around|before) \|", DOCUMENTS["docs/how-it-works.md"], re.MULTILINE
    )
    assert len(rows) == len(set(rows))
    assert set(rows) == hooked


def test_every_line_of_the_log_is_written_somewhere() -> None:
    written = {
        re.sub(r"%(?:\.\d+)?[sdf]", "*", node.args[0].value)
        for path in (ROOT / "src" / "toolgap" / "sglang").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }
    lines = re.findall(r"^\| `(toolgap[ :][^`]*)` \|", DOCUMENTS["docs/operating.md"], re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        assert re.sub(r"\b[A-Z]{2,}\b|\.\.\.", "*", line.replace(f"POST {PATH}", "*")) in written
