"""SGLang's plugin entry point: checks the installed release, then registers every hook, or none.

Imported in every SGLang process, so SGLang's own modules are imported only once it is called.
"""

import logging
import multiprocessing
import os
import sys
from typing import Any, NamedTuple

from toolgap.protocol import PATH
from toolgap.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

ENDPOINT = f"POST {PATH}"

APP_PATH_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
"""SGLang's, which names the app of a server with several tokenizer workers, and is read in no other."""

APP_PATH = "toolgap.sglang.workers:app"


class Hook(NamedTuple):
    """One place in SGLang where Toolgap acts."""

    target: str
    kind: str
    function: Any


def register() -> None:
    """Register Toolgap's hooks with SGLang, unless the installed release differs from what they expect."""
    import setproctitle

    from toolgap.sglang import internals

    title = setproctitle.getproctitle()
    if not internals.wants_hooks(title):
        return
    try:
        settings = Settings.from_environ(os.environ)
    except SettingsError as error:
        logger.error("toolgap is off, the server starts without %s: %s", ENDPOINT, error)
        return
    problems = internals.check(http=_may_serve_http())
    if problems:
        logger.error(
            "toolgap is off, the server starts without %s: %s. `toolgap doctor` prints the same check.",
            ENDPOINT,
            "; ".join(problems),
        )
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from toolgap.sglang import frontend, hooks

    table = _relay_hooks() if internals.relays_to_replicas(title) else _hooks()
    targets = [hook.target for hook in table]
    hooks.configure(settings, lambda: internals.unapplied(targets))
    frontend.configure(settings, lambda: internals.unapplied(targets))
    for hook in table:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    # An app that the operator chose stays; `toolgap doctor` says what it has to do.
    os.environ.setdefault(APP_PATH_VARIABLE, APP_PATH)


def _may_serve_http() -> bool:
    """False in a scheduler, which SGLang spawns without its HTTP server's module."""
    return multiprocessing.parent_process() is None or "sglang.srt.entrypoints.http_server" in sys.modules


def _relay_hooks() -> list[Hook]:
    """In the process between the HTTP process and the replicas; it has imported the messages by then."""
    from toolgap.sglang import hooks, internals

    return [Hook(internals.REPLICAS_INIT_INFO, "after", hooks.get_replicas_init_info)]


def _hooks() -> list[Hook]:
    from toolgap.sglang import frontend, hooks, internals

    return [
        Hook(internals.INIT_COMMUNICATORS, "after", frontend.init_communicators),
        Hook(internals.TOKENIZER_ATTACH, "around", frontend.change_storage),
        Hook(internals.TOKENIZER_DETACH, "around", frontend.change_storage),
        Hook(internals.TOKENIZER_CLEAR, "around", frontend.change_storage),
        Hook(internals.TOKENIZER_RELEASE_MEMORY, "around", frontend.release_memory),
        Hook(internals.INIT_DISPATCHER, "after", hooks.init_request_dispatcher),
        Hook(internals.GET_INIT_INFO, "after", hooks.get_init_info),
        Hook(internals.POLL_TIMEOUTS, "after", hooks.poll_timeout_aborts),
        Hook(internals.CHECK_EVENTS, "after", hooks.check_hicache_events),
        Hook(internals.PREFETCH, "around", hooks.prefetch_from_storage),
        Hook(internals.CHECK_PROGRESS, "around", hooks.check_prefetch_progress),
        Hook(internals.RELEASE_ABORTED, "after", hooks.release_aborted_request),
        Hook(internals.RESET, "after", hooks.reset_full),
        Hook(internals.RATE_LIMITED, "around", hooks.prefetch_rate_limited),
        Hook(internals.ALLOCATE, "around", hooks.allocate_storage_hit),
        Hook(internals.EVICT_HOST, "around", hooks.evict_host),
        Hook(internals.CHECKPOINT, "after", hooks.checkpoint),
        Hook(internals.READY_TO_LOAD, "around", hooks.ready_to_load),
        Hook(internals.QUERY_STORAGE, "around", hooks.ask_storage),
        Hook(internals.READ_STORAGE, "around", hooks.read_storage),
        Hook(internals.PREFILLED, "after", hooks.prefilled),
        Hook(internals.PREFILLED_FOR_DECODE, "after", hooks.prefilled),
        Hook(internals.FLUSH_CACHE, "around", hooks.flush_cache),
        Hook(internals.SCHEDULER_ATTACH, "around", hooks.change_storage),
        Hook(internals.SCHEDULER_DETACH, "around", hooks.change_storage),
        Hook(internals.SCHEDULER_CLEAR, "around", hooks.clear_storage),
        Hook(internals.CACHE_CLEAR, "after", hooks.storage_cleared),
        Hook(internals.WEIGHT_VERSION, "after", hooks.weight_version_changed),
        Hook(internals.BEGIN_WEIGHT_UPDATE, "around", hooks.update_weights),
        *(Hook(target, "around", hooks.update_weights) for target in internals.UPDATE_WEIGHTS),
        Hook(internals.RELEASE_MEMORY, "around", hooks.release_memory),
    ]
