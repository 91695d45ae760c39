"""The files of deploy/: their settings exist, their probes answer, and what ends has the time it takes."""

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.routing import Route

from toolgap.gateway.app import application
from toolgap.gateway.config import PREFIX, Config, load
from toolgap.serve import plan
from toolgap.settings import Settings, variable
from toolgap.sglang.internals.targets import SUPPORTED

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
MANIFESTS: list[dict[str, Any]] = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
DOCKERFILES = {path.name: path.read_text(encoding="utf-8") for path in DEPLOY.glob("*.Dockerfile")}


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


SETTINGS = manifest("ConfigMap", "toolgap")["data"]
GATEWAY = manifest("Deployment", "toolgap-gateway")["spec"]
WORKER = manifest("StatefulSet", "toolgap-worker")["spec"]
GATEWAY_POD, WORKER_POD = GATEWAY["template"]["spec"], WORKER["template"]["spec"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return dict(only)


def environment(pod: dict[str, Any]) -> dict[str, str]:
    """As the container gets it, without the Secret, which is optional."""
    found = {}
    for entry in container(pod)["env"]:
        given = entry.get("valueFrom", {})
        if "secretKeyRef" in given:
            assert given["secretKeyRef"]["optional"]
        else:
            found[entry["name"]] = entry.get("value") or SETTINGS[given["configMapKeyRef"]["key"]]
    return found


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * (60 if unit == "m" else 1)


def image_environment(name: str) -> dict[str, str]:
    return dict(re.findall(r"\b([A-Z][A-Z0-9_]+)=(\S+)", DOCKERFILES[name].replace("ARG ", "")))


# ---- the gateway ----


def test_gateway_of_kubernetes() -> None:
    config = load({}, environment(GATEWAY_POD))
    workers = [
        f"http://toolgap-worker-{number}.{WORKER['serviceName']}:30000"
        for number in range(WORKER["replicas"])
    ]
    assert list(config.upstreams) == workers
    assert config.host == "0.0.0.0"
    named = [entry["name"] for entry in container(GATEWAY_POD)["env"]]
    known = {f"{PREFIX}{name.upper()}" for name in Config.__struct_fields__}
    assert set(named) <= known


def test_gateway_of_kubernetes_drains_before_it_is_killed() -> None:
    config = load({}, environment(GATEWAY_POD))
    pause_s = container(GATEWAY_POD)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert GATEWAY_POD["terminationGracePeriodSeconds"] >= pause_s + config.drain_s + 10


def test_gateway_of_compose() -> None:
    gateway = COMPOSE["gateway"]
    config = load({}, gateway["environment"])
    assert config.upstreams == ("http://worker:30000",)
    assert "worker" in COMPOSE
    assert seconds(gateway["stop_grace_period"]) >= config.drain_s + 10
    assert gateway["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]


def test_gateways_own_paths_are_probed() -> None:
    app = application(Config(upstreams=("http://127.0.0.1:9",), restore=False))
    own = {route.path for route in app.routes if isinstance(route, Route)}
    gateway = container(GATEWAY_POD)
    probed = {
        gateway[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert probed == {"/healthz", "/readyz"}
    assert probed <= own
    assert "/healthz" in DOCKERFILES["gateway.Dockerfile"]
    assert GATEWAY["template"]["metadata"]["annotations"]["prometheus.io/path"] in own


def test_gateways_port_is_the_default() -> None:
    port = Config(upstreams=("http://127.0.0.1:9",)).port
    assert container(GATEWAY_POD)["ports"] == [{"name": "http", "containerPort": port}]
    assert GATEWAY["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    assert f"EXPOSE {port}\n" in DOCKERFILES["gateway.Dockerfile"]
    assert f":{port}/healthz" in DOCKERFILES["gateway.Dockerfile"]


# ---- the workers ----


@pytest.mark.parametrize("arguments", [COMPOSE["worker"]["command"], container(WORKER_POD)["args"]])
def test_workers_arguments(arguments: list[str]) -> None:
    assert arguments[0] == "--"
    launch = plan(arguments[1:], {}, {}, default_cpu_model=Path)
    assert "--enable-hierarchical-cache" in launch.command
    assert arguments[arguments.index("--port") + 1] == "30000"


@pytest.mark.engine
def test_workers_arguments_are_known_to_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for arguments in (COMPOSE["worker"]["command"], container(WORKER_POD)["args"]):
        # As compose has it where the variable is not set.
        given = [re.sub(r"\$\{[A-Z_]+:-(\d+)\}", r"\1", argument) for argument in arguments[1:]]
        known = parser.parse_args(given)
        assert (known.hicache_storage_backend, known.hicache_ratio, known.page_size) == ("file", 2.0, 64)


def test_workers_release_is_the_supported_one() -> None:
    (release,) = SUPPORTED
    text = DOCKERFILES["worker.Dockerfile"]
    assert f"ARG SGLANG_IMAGE=lmsysorg/sglang:v{release}\n" in text
    assert f"assert version('sglang') == '{release}'" in text


def test_workers_have_the_gpus_that_they_spread_over() -> None:
    worker = container(WORKER_POD)
    spread = worker["args"][worker["args"].index("--tp-size") + 1]
    assert worker["resources"]["requests"]["nvidia.com/gpu"] == spread
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == spread


def test_storage_is_a_volume() -> None:
    folder = image_environment("worker.Dockerfile")["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]
    assert f"kv:{folder}" in COMPOSE["worker"]["volumes"]
    mounts = {one["name"]: one["mountPath"] for one in container(WORKER_POD)["volumeMounts"]}
    (claim,) = WORKER["volumeClaimTemplates"]
    assert mounts[claim["metadata"]["name"]] == folder
    assert mounts.keys() == {claim["metadata"]["name"], *(one["name"] for one in WORKER_POD["volumes"])}


def test_no_setting_of_toolgap_is_unknown() -> None:
    gateway = {f"{PREFIX}{name.upper()}" for name in Config.__struct_fields__}
    known = gateway | {variable(field.name) for field in fields(Settings)}
    texts = [path.read_text(encoding="utf-8") for path in DEPLOY.rglob("*") if path.is_file()]
    used = {name for text in texts for name in re.findall(r"\bTOOLGAP_[A-Z_]+[A-Z]\b", text)}
    assert used
    assert used <= known


# ---- what belongs together ----


@pytest.mark.parametrize("name", ["toolgap-gateway", "toolgap-worker"])
def test_services_and_budgets_select_the_pods(name: str) -> None:
    pods = (GATEWAY if name == "toolgap-gateway" else WORKER)["template"]["metadata"]["labels"]
    assert manifest("Service", name)["spec"]["selector"].items() <= pods.items()
    assert manifest("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"].items() <= pods.items()


@pytest.mark.parametrize("pod", [GATEWAY_POD, WORKER_POD])
def test_nothing_runs_as_root(pod: dict[str, Any]) -> None:
    user = pod["securityContext"]["runAsUser"]
    assert pod["securityContext"]["runAsNonRoot"]
    for text in DOCKERFILES.values():
        assert f"--uid {user} " in text
        assert f"USER {user}:{user}\n" in text
