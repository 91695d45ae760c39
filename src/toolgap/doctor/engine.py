"""A running server's engine: its storage, and what is restored from it now."""

from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.doctor.prompt import check_prompt
from toolgap.doctor.rules import NO_STORAGE_MEND
from toolgap.protocol import EngineStatus, Overview


def check_engine(engine: EngineStatus, prompt_tokens: int | None) -> list[Finding]:
    """Findings about what the engine reports of itself; ``prompt_tokens`` is the length of a prefix to restore."""
    findings = []
    if engine.storage_backend is None:
        findings.append(
            problem(
                "storage-backend",
                "No storage backend is attached: there is nothing to restore from, and submits are refused.",
                NO_STORAGE_MEND,
            )
        )
    else:
        findings.append(ok("storage-backend", f"The storage backend is {engine.storage_backend}."))
        findings.append(_check_capacity(engine))
        findings.append(
            check_prompt(
                prompt_tokens,
                engine.prefetch_threshold_tokens,
                engine.page_tokens,
                engine.max_operation_tokens,
            )
        )
    if engine.paused:
        findings.append(
            note("paused", "Generation is paused, and submits get 503.", "POST /continue_generation.")
        )
    return findings


def check_storage_calls(overview: Overview) -> list[Finding]:
    """Findings about storage calls that hang, on every replica."""
    return [
        problem(
            "storage-reads",
            f"{engine.stalled_reads} storage calls were given up and have not returned"
            f"{'' if engine.dp_rank is None else f' on replica {engine.dp_rank}'}; they keep "
            f"{engine.quarantined_tokens} tokens of host memory.",
            "See whether the storage behind the backend hangs.",
        )
        for engine in overview.replicas or [overview.engine]
        if engine.stalled_reads
    ]


def _check_capacity(engine: EngineStatus) -> Finding:
    if engine.prefetch_capacity_tokens <= 0:
        return problem(
            "prefetch-capacity",
            "The prefetch capacity is 0 tokens: SGLang reads nothing from storage, and submits are refused.",
            "Give SGLang more host memory: --hicache-size or --hicache-ratio.",
        )
    return ok(
        "prefetch-capacity",
        f"Reads of {engine.prefetch_capacity_tokens} tokens fit at once, and operations may fill "
        f"{engine.max_operation_tokens} of {engine.host_total_tokens} tokens of host memory.",
    )
