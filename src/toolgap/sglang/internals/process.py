"""Which of SGLang's processes this is, and how the server is split into ranks."""


def wants_hooks(process_title: str) -> bool:
    """Whether an SGLang process with this title has a part in restores."""
    return not process_title.startswith("sglang::detokenizer")


def relays_to_replicas(process_title: str) -> bool:
    """Whether an SGLang process with this title stands between the HTTP process and the replicas."""
    return process_title.startswith("sglang::data_parallel_controller")


def replicas() -> int:
    """Replicas, or groups of data-parallel attention, behind this HTTP process: each has a cache of its own."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().num_dp_ranks)


def parallel_obstacle() -> str | None:
    """Why ranks that are set up like this server's cannot restore anything; None if they can.

    The same in the HTTP process and on every rank.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for present, what in (
        (parallel.attn_cp_size > 1, "context parallelism"),
        (parallel.dcp_size > 1, "decode context parallelism"),
    ):
        if present:
            return f"{what} is not supported by this release of toolgap"
    return None
