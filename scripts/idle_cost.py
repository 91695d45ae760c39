"""What the hooks cost a scheduler step while no operation is active, in nanoseconds.

Calls each hot hook through SGLang's own wrapper around a function that does nothing, with a real
restorer that has no work, and subtracts the call of that function alone. Prints JSON; what a step
costs in all is the sum over ``per_step``, and ``per_request`` comes on top for each waiting request.

Run it in the engine's environment: ``.venv/bin/python scripts/idle_cost.py``.
"""

import json
import platform
import statistics
import timeit
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from toolgap.settings import Settings
from toolgap.sglang import hooks
from toolgap.sglang.internals import Engine
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.restorer import Restorer

CALLS = 200_000
TRIALS = 7


def nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def median_ns(call: Callable[[], object]) -> float:
    return statistics.median(timeit.repeat(call, number=CALLS, repeat=TRIALS)) / CALLS * 1e9


def cost_ns(hook: Callable[..., Any], kind: HookType, *arguments: Any) -> float:
    wrapped = _wrap_fn(nothing, hook, kind)
    return round(median_ns(lambda: wrapped(*arguments)) - median_ns(lambda: nothing(*arguments)), 1)


def main() -> None:
    cache, request = SimpleNamespace(page_size=1), SimpleNamespace(rid="request")
    engine = Engine(SimpleNamespace(tree_cache=cache))
    hooks._restorer = Restorer(
        engine, Settings(), hooks._calls, Metrics(enabled=False, labels={}), hooks._meter
    )
    result = {
        "per_step": {
            "_poll_timeout_aborts": cost_ns(hooks.poll_timeout_aborts, HookType.AFTER, cache),
            "check_hicache_events": cost_ns(hooks.check_hicache_events, HookType.AFTER, cache),
        },
        "per_request": {
            "prefetch_from_storage": cost_ns(
                hooks.prefetch_from_storage, HookType.AROUND, cache, request, 0, []
            ),
            "check_prefetch_progress": cost_ns(
                hooks.check_prefetch_progress, HookType.AROUND, cache, request
            ),
            "prefetch_rate_limited": cost_ns(hooks.prefetch_rate_limited, HookType.AROUND, cache),
            "release_aborted_request": cost_ns(hooks.release_aborted_request, HookType.AFTER, cache, request),
        },
        "unit": "ns, median of trials",
        "calls": CALLS,
        "trials": TRIALS,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "sglang": metadata.version("sglang"),
        "toolgap": metadata.version("toolgap"),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
