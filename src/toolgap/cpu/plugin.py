"""SGLang plugin ``toolgap_cpu``: what stock SGLang lacks for HiCache on a CPU, added by hooks.

It does nothing unless ``TOOLGAP_CPU=1``. Then every hook's target is checked first, because a CPU
server that misses one of them dies in its first request or, worse, wastes every cache hit.
"""

import gc
import inspect
import logging
import multiprocessing
import os
import pkgutil
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

ACTIVE_VARIABLE = "TOOLGAP_CPU"

FORK_VARIABLE = "TOOLGAP_CPU_FORK"
"""Set to 1, the server's processes are forked rather than started afresh: see :func:`fork`."""

_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_LATENT_HOST_POOL = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_RESERVE = "sglang.srt.mem_cache.pool_host.base"


class CpuHook(NamedTuple):
    """One hook: what it goes on, what that must look like, and what it does."""

    target: str
    kind: str
    """The name of a ``HookType``."""
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    """Parameter names of the target without ``self``: all of them, in order, for a REPLACE;
    those that the hook relies on otherwise."""


def register() -> None:
    """Entry point, called once in every SGLang process.

    Raises:
        SystemExit: CPU mode is asked for and this SGLang is not the one the hooks are written for.
    """
    if os.environ.get(ACTIVE_VARIABLE) != "1":
        return
    hooks = list(cpu_hooks())
    if os.environ.get(FORK_VARIABLE) == "1":
        hooks.append(FORK_HOOK)
    problems = [problem for hook in hooks if (problem := mismatch(hook))]
    problems += _reserve_problems()
    if problems:
        for problem in problems:
            logger.error("toolgap_cpu: %s", problem)
        # load_plugins() logs and swallows an Exception; this must stop the server.
        raise SystemExit(
            "toolgap: cannot run SGLang on this CPU, because the installed sglang differs from "
            f"the release that toolgap supports: {'; '.join(problems)}"
        )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    # Stock keeps 10 GiB of RAM free of host pools: more than a laptop has to spare.
    pkgutil.resolve_name(_RESERVE).HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    # Stock asks for it when it pads a batch for data-parallel attention, and has it for AMX only.
    pkgutil.resolve_name(_ATTENTION).get_cpu_graph_seq_len_fill_value = lambda backend: 1


def cpu_hooks() -> Sequence[CpuHook]:
    """The hooks of CPU mode. Imports torch."""
    from toolgap.cpu import attention, pinning, transfers

    return (
        *_host_pool_hooks(
            _HOST_POOL, transfers.load_to_device_per_layer, transfers.backup_from_device_all_layer
        ),
        *_host_pool_hooks(
            _LATENT_HOST_POOL,
            transfers.load_latent_to_device_per_layer,
            transfers.backup_latent_from_device_all_layer,
        ),
        CpuHook(
            "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.__init__",
            "AFTER",
            add_stream_synchronize,
            ("io_backend",),
        ),
        CpuHook(
            f"{_ATTENTION}._run_sdpa_forward_extend",
            "REPLACE",
            attention.run_sdpa_forward_extend,
            (
                "query",
                "output",
                "k_cache",
                "v_cache",
                "req_to_token",
                "req_pool_indices",
                "seq_lens",
                "extend_prefix_lens",
                "extend_seq_lens",
                "encoder_lens",
                "scaling",
                "enable_gqa",
                "causal",
                "is_cross_attn",
                "sliding_window_size",
            ),
        ),
        CpuHook(
            f"{_ATTENTION}._run_sdpa_forward_decode",
            "REPLACE",
            attention.run_sdpa_forward_decode,
            (
                "query",
                "output",
                "k_cache",
                "v_cache",
                "req_to_token",
                "req_pool_indices",
                "seq_lens",
                "encoder_lens",
                "scaling",
                "enable_gqa",
                "causal",
                "is_cross_attn",
                "sliding_window_size",
            ),
        ),
        CpuHook(
            "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
            "BEFORE",
            # Stock builds both for several ranks on any device, and they need a GPU.
            force_arguments(
                "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
                use_pynccl=False,
                use_custom_allreduce=False,
            ),
            ("use_pynccl", "use_custom_allreduce"),
        ),
        CpuHook("sglang.srt.lora.lora_manager.LoRAManager.__init__", "BEFORE", pinning.ignore_pinning, ()),
        CpuHook("torch.get_device_module", "AROUND", device_module, ("device",)),
        CpuHook("sglang.srt.managers.scheduler.Scheduler.__init__", "AFTER", freeze_garbage, ()),
    )


def _host_pool_hooks(
    pool: str, load: Callable[..., None], backup: Callable[..., None]
) -> tuple[CpuHook, CpuHook, CpuHook]:
    """A host pool without pinned memory, which copies with torch."""
    return (
        CpuHook(
            f"{pool}.__init__",
            "BEFORE",
            force_arguments(f"{pool}.__init__", pin_memory=False),
            ("pin_memory",),
        ),
        CpuHook(
            f"{pool}.load_to_device_per_layer",
            "REPLACE",
            load,
            (
                "device_pool",
                "host_indices",
                "device_indices",
                "layer_id",
                "io_backend",
                "is_draft",
            ),
        ),
        CpuHook(
            f"{pool}.backup_from_device_all_layer",
            "REPLACE",
            backup,
            ("device_pool", "host_indices", "device_indices", "io_backend"),
        ),
    )


def device_module(original: Callable[[Any], Any], device: Any = None) -> Any:
    """AROUND hook: a CUDA build of torch answers ``torch.cuda`` even where there is no GPU.

    Stock asks it to synchronize when memory is released, which ends the scheduler.
    """
    return original("cpu" if device is None else device)


def mismatch(hook: CpuHook) -> str | None:
    """How the installed SGLang differs from what the hook expects; None if it does not."""
    try:
        target = pkgutil.resolve_name(hook.target)
        found = tuple(name for name in inspect.signature(target).parameters if name != "self")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{hook.target} is not there ({error})"
    exact = hook.kind == "REPLACE"
    if found == hook.parameters or (not exact and set(hook.parameters) <= set(found)):
        return None
    wanted = f"{'exactly ' if exact else ''}({', '.join(hook.parameters)})"
    return f"{hook.target} takes ({', '.join(found)}) where {wanted} is expected"


def force_arguments(target: str, **forced: Any) -> Callable[..., tuple[tuple[Any, ...], Any]]:
    """A BEFORE hook that sets these arguments however the caller passed them."""
    signature: inspect.Signature | None = None

    def before(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal signature
        if signature is None:
            signature = inspect.signature(pkgutil.resolve_name(target))
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(forced)
        return bound.args, bound.kwargs

    return before


def add_stream_synchronize(result: None, engine: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook: stock calls it when a transfer fails, and without it the failure is masked.

    ``torch.cpu.Stream`` has no ``synchronize``; CPU copies are done when the call returns.
    """
    for stream in (engine.device_to_host_stream, engine.host_to_device_stream):
        stream.synchronize = lambda: None


def freeze_garbage(result: None, *args: Any, **kwargs: Any) -> None:
    """AFTER hook: take what the scheduler was built of out of garbage collection.

    On a CPU every cache flush runs a full collection, half a second over SGLang's modules. Stock
    freezes them after its warm-up request; without one it may try before the server listens, and
    then does not try again.
    """
    gc.collect()
    gc.freeze()


def fork(result: None, server_args: Any) -> None:
    """AFTER hook: halve the CPU time of a start by importing SGLang once instead of thrice.

    For tests that start many servers; off unless asked for, because forking is safe only while the
    parent has no threads but those of numpy and scipy, which SGLang does not promise, and because
    no GPU server can do it.
    """
    if server_args.dp_size > 1 or server_args.attn_dp_size > 1:
        # The replicas' controller starts them from several threads, and has plugins of its own to load.
        return
    multiprocessing.set_start_method("fork", force=True)
    # The parent's handler would make a child that is told to quit answer for the parent.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))


FORK_HOOK = CpuHook("sglang.srt.entrypoints.engine._set_envs_and_config", "AFTER", fork, ("server_args",))


def _reserve_problems() -> list[str]:
    name = f"{_RESERVE}.HICACHE_HOST_MEMORY_RESERVE_BYTES"
    try:
        value = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        return [f"{name} is not there ({error})"]
    return [] if isinstance(value, int) else [f"{name} is {value!r} where a number is expected"]
