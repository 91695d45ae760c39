"""Hand-made runs for the tests of evidence, reports and verification."""

from pathlib import Path
from typing import Any

import msgspec

from toolgap.bench.arms import Arm
from toolgap.bench.evidence import MANIFEST, TRIALS, Manifest
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.recipes.matrix import Matrix
from toolgap.bench.records import Trial
from toolgap.bench.validity import COUNTERS, LOADED_BACK, PREFETCHED, judge
from toolgap.protocol import OperationStatus, Reason, State

WHOLE = 4080
TTFT_MS = {
    "A": 8000.0,
    "B": 400.0,
    "B-wait": 410.0,
    "C": 200.0,
    "D": 155.0,
    "L2": 190.0,
    "L1": 150.0,
    "W": 180.0,
}
FOUND = {
    "A": (0, 0, 0),
    "C": (0, WHOLE, 0),
    "D": (WHOLE, 0, 0),
    "L2": (0, WHOLE, 0),
    "L1": (WHOLE, 0, 0),
    "W": (WHOLE, 0, 0),
}

PLAN = Plan(
    recipe="matrix",
    seed=1,
    rounds=2,
    prompt_tokens=(4096,),
    gaps_ms=(0.0, 1000.0),
    arms=tuple(Arm),
    page_tokens=16,
    page_cache="warm",
)


def manifest(**fields: Any) -> Manifest:
    values: dict[str, Any] = {
        "run": "a-run",
        "began": "2026-11-29T12:00:00+00:00",
        "plan": PLAN,
        "model": "a-model",
        "hardware": {"cpu": "a CPU, 2 cores", "gpus": []},
        "software": {"sglang": "0.5.23"},
        "server_arguments": ["--page-size", "16"],
        "server_environment": {},
        "engine": {"device": "cpu"},
        "differences_from_stock": ["no GPU"],
        "sglang_files_changed": [],
        "toolgap_sha256": {"cli.py": "00"},
        "sglang_sha256": {"srt/a.py": "11"},
    }
    return Manifest(**values | fields)


def trial(arm: str = "C", gap_ms: float = 0.0, round_number: int = 0, **fields: Any) -> Trial:
    cell = Cell(prompt_tokens=4096, arm=arm, gap_ms=gap_ms)
    device, host, storage = FOUND.get(arm, (0, 0, WHOLE))
    reads = arm in ("B", "B-wait", "C", "D", "W")
    counters = dict.fromkeys(COUNTERS, 0.0)
    counters |= {
        PREFETCHED: float(WHOLE if reads else 0),
        LOADED_BACK: float(WHOLE if arm == "D" else host + storage),
    }
    values: dict[str, Any] = {
        "trial_id": cell.trial_id(round_number),
        "round": round_number,
        "cell": cell,
        "prefix_tokens": WHOLE,
        "began_ts": 1.0,
        "policy": "timeout",
        "page_cache": "warm",
        "page_cache_share": 1.0,
        "gap_ms": gap_ms,
        "late_ms": 0.0,
        "ttft_ms": TTFT_MS[arm] + round_number,
        "total_ms": TTFT_MS[arm] + 100,
        "sent_ts": 2.0,
        "output_ids": [1, 2],
        "reference_ids": [1, 2],
        "device_tokens": device,
        "host_tokens": host,
        "storage_tokens": storage,
        "counters": counters,
        "host_free_tokens": (9000, 9000),
        "sentinel_tokens": 512,
        "sentinel_resident_tokens": 512,
        "times": {"request_received_ts": 2.001, "forward_entry_time": 2.01, "prefill_finished_time": 2.1},
        "operation": operation() if arm in ("C", "D") else None,
        "warm_up": {"ended_before": True} if arm == "W" else None,
    }
    made = Trial(**values | fields)
    made.invalid = judge(made)
    return made


def operation(**fields: Any) -> OperationStatus:
    values: dict[str, Any] = {
        "operation_id": "o",
        "state": State.RESTORED,
        "reason": Reason.COMPLETE,
        "requested_tokens": WHOLE,
        "aligned_tokens": WHOLE,
        "resident_tokens": 0,
        "found_tokens": WHOLE,
        "read_tokens": WHOLE,
        "inserted_tokens": WHOLE,
        "ttl_s": 60.0,
        "elapsed_s": 0.2,
        "queried_s": 0.01,
        "first_read_s": 0.05,
        "read_s": 0.19,
        "namespace": "n",
    }
    return OperationStatus(**values | fields)


def trials() -> list[Trial]:
    """One of each cell that :data:`PLAN` asks for."""
    cells = Matrix().cells(PLAN)
    return [trial(cell.arm, cell.gap_ms, number) for number in range(PLAN.rounds) for cell in cells]


def run(folder: Path, made: list[Trial] | None = None) -> Path:
    """Write a run as it would have been measured; its folder."""
    folder = folder / "a-run"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest()), indent=1) + b"\n")
    lines = [msgspec.json.encode(one) + b"\n" for one in (trials() if made is None else made)]
    (folder / TRIALS).write_bytes(b"".join(lines))
    return folder
