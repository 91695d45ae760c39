"""What a sound server answers, and how findings are picked out."""

from typing import Any

import msgspec

from samples import ENGINE
from toolgap.doctor.answers import ServerAnswers
from toolgap.doctor.findings import Finding, Level
from toolgap.protocol import VERSION, Overview

SUPPORTED = ("0.5.23",)

HICACHE = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]

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


def problems(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.level is Level.PROBLEM}


def named(findings: list[Finding], name: str) -> Finding:
    [finding] = [finding for finding in findings if finding.name == name]
    return finding
