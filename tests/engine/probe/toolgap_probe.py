"""A test-only SGLang plugin: reports every call of the file backend to the test, and does as it is told.

Loaded through its entry point when this folder is on PYTHONPATH. It changes nothing of what the engine
computes: the test sees each call before it happens and answers "go", "miss" or "fail", or lets it wait.
"""

import json
import multiprocessing
import os
import pkgutil
import socket
import threading
from pathlib import Path
from typing import Any

_SOCKET = os.environ.get("TOOLGAP_PROBE_SOCKET")
_TRANSFER = os.environ.get("TOOLGAP_PROBE_TRANSFER")
"""A file: while it exists, no decode server answers. Set, KV goes to none: SGLang's own fake transfer."""
_local = threading.local()
_host_locks = 0
_states = 0
"""How often this process was asked for its state: the same on every rank, since all get every message."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target := os.environ.get("TOOLGAP_PROBE_CHANGE"):
        _change_signature(target)
    if (
        (target := os.environ.get("TOOLGAP_PROBE_CHANGE_IN_SCHEDULER"))
        and multiprocessing.parent_process()
        and _is_to_be_changed()
    ):
        _change_signature(target)
    if not _SOCKET:
        return
    file_backend = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"
    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    HookRegistry.register(f"{file_backend}.get", _get, HookType.AROUND)
    HookRegistry.register(f"{file_backend}.batch_exists", _batch_exists, HookType.AROUND)
    HookRegistry.register("toolgap.store.store.Store.read", _read, HookType.AROUND)
    HookRegistry.register(f"{cache}.inc_host_lock_ref", _locked, HookType.AFTER)
    HookRegistry.register(f"{cache}.dec_host_lock_ref", _unlocked, HookType.AFTER)
    HookRegistry.register(f"{cache}._reset_full", _reset, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state", _internal_state, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        _http_state,
        HookType.AROUND,
    )
    if _TRANSFER:
        utils, fake = "sglang.srt.disaggregation.utils", "sglang.srt.disaggregation.fake.conn.FakeKVSender"
        HookRegistry.register(f"{utils}.get_kv_class", _get_kv_class, HookType.AROUND)
        HookRegistry.register(f"{fake}.poll", _poll_transfer, HookType.AROUND)


def _is_to_be_changed() -> bool:
    """Of several schedulers, only the first one if the test wants that."""
    once = os.environ.get("TOOLGAP_PROBE_CHANGE_ONCE")
    if once is None:
        return True
    import setproctitle

    if setproctitle.getproctitle().startswith(("sglang::data_parallel", "sglang::detokenizer")):
        return False
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _change_signature(target: str) -> None:
    """Make a method of one argument look like that of another release; it works as before."""
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)

    def changed(self: Any, argument: Any, a_parameter_of_another_release: Any = None) -> Any:
        return original(self, argument)

    setattr(owner, name, changed)


def _ask(call: str, detail: str) -> str:
    if not hasattr(_local, "stream"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(_SOCKET)  # type: ignore[arg-type]
        _local.stream = connection.makefile("rw")
    try:
        message = {"call": call, "detail": detail, "rank": _rank()}
        print(json.dumps(message), file=_local.stream, flush=True)
        return _local.stream.readline().strip() or "go"
    except (OSError, ValueError):
        return "go"  # the test is over


def _rank() -> int:
    """This process among all that hold a part of the cache: replicas first, then stages, then tensor ranks."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    replica = 0 if parallel.attn_dp_enabled else parallel.dp_rank or 0
    return int((replica * parallel.pp_size + parallel.pp_rank) * parallel.tp_size + parallel.tp_rank)


def _get(original: Any, backend: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    answer = _ask("get", key)
    if answer == "fail":
        raise OSError(f"the test made the read of {key} fail")
    return None if answer == "miss" else original(backend, key, *args, **kwargs)


def _read(original: Any, store: Any, pages: Any, *args: Any) -> Any:
    """A read of Toolgap's store, before it begins."""
    _ask("read", str(len(pages)))
    return original(store, pages, *args)


def _batch_exists(original: Any, backend: Any, keys: list[str], *args: Any, **kwargs: Any) -> Any:
    if _ask("exists", str(len(keys))) == "fail":
        raise OSError("the test made the query fail")
    return original(backend, keys, *args, **kwargs)


def _get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """What SGLang takes for a request with a fake peer, for every request: no transfer library is needed."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

    if class_type is KVClassType.BOOTSTRAP_SERVER:
        return CommonKVBootstrapServer
    return original(TransferBackend.FAKE, class_type)


def _poll_transfer(original: Any, sender: Any) -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    if _TRANSFER and not sender.inited and Path(_TRANSFER).exists():
        return KVPoll.Bootstrapping
    return original(sender)


def _locked(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    global _host_locks
    _host_locks += 1


def _unlocked(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    global _host_locks
    _host_locks -= 1


def _reset(_result: Any, _cache: Any) -> None:
    global _host_locks
    _host_locks = 0  # the tree was dropped, and its locks with it


def _internal_state(output: Any, scheduler: Any, *_args: Any) -> Any:
    from toolgap.sglang import hooks

    global _states
    _states += 1
    problem = None
    try:
        if hooks._restorer is not None:
            hooks._restorer.check_integrity()
    except AssertionError as error:
        problem = f"{type(error).__name__}: {error}"
    cache = scheduler.tree_cache
    restorer = hooks._restorer
    state = {
        "number": _states,
        "pid": os.getpid(),
        "dp_rank": None if restorer is None else restorer.engine.dp_rank,
        "agreed": {} if restorer is None or restorer.engine.obstacle() else _agreed(restorer),
        "problem": problem,
        "host_locks": _host_locks,
        "bootstrapping": len(getattr(scheduler.disagg_prefill_bootstrap_queue, "queue", ())),
        "handles": len(getattr(cache, "prefetch_loaded_tokens_by_reqid", ()))
        + len(getattr(cache, "_storage_prefetch_wait", ())),
        "resident_kib": _resident_kib(),
        "scheduler_pid": os.getpid(),
    }
    _ask("state", json.dumps(state))
    output.internal_state["toolgap_probe"] = state
    return output


def _agreed(restorer: Any) -> dict[str, Any]:
    """What all ranks of a replica must have in common."""
    engine = restorer.engine
    return {
        "operations": {
            operation.operation_id: [
                operation.state,
                operation.reason,
                operation.resident_tokens,
                operation.read_tokens,
                operation.inserted_tokens,
                operation.joined_requests,
            ]
            for operation in (restorer.log.active | restorer.log.outcomes).values()
        },
        "joins": sorted(handle.rid for handle in restorer.joins),
        "namespace": restorer.validity.namespace,
        "rates": str(restorer.rates),
        "own_tokens": engine.own_tokens,
        "occupied_tokens": engine.prefetch_occupied_tokens,
        "host_free_tokens": engine.host_free_tokens,
    }


async def _http_state(original: Any, *args: Any) -> Any:
    from toolgap.sglang import frontend

    states = await original(*args)
    assert frontend._frontend is not None
    states[0]["toolgap_probe"]["waiting_calls"] = frontend._frontend.replies.pending
    states[0]["toolgap_probe"]["http_pid"] = os.getpid()
    return states


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
