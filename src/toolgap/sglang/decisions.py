"""What time asks for: the one place that reads a clock to decide, on one rank of those that decide alike.

What it says comes back to every rank as a message, and :meth:`Restorer.apply` does it there.
"""

from toolgap.sglang.messages import Decide, HicachePrefetchReqInput, encode_order
from toolgap.sglang.restorer import Restorer


def decide(restorer: Restorer) -> HicachePrefetchReqInput | None:
    """What is due now, for all ranks; None if nothing is. Said again until it was applied."""
    now, settings = restorer.clock(), restorer.settings
    restorer.watch.step(now, paused=restorer.engine.paused)
    due = restorer.log.due(restorer.limits)
    release = restorer.joins.due(now)
    unlease = restorer.leases.due(now)
    hang, replace = restorer.stalls.due(settings.stall_timeout_s, settings.reader_patience_s)
    rates = restorer.meter.news(restorer.rates) if restorer.meter.changed else None
    if not (due or release or unlease or hang or replace or rates):
        return None
    order = Decide(
        expire=due.expire,
        stall=due.stall,
        abandon=due.abandon,
        release=release,
        unlease=unlease,
        hang=hang,
        replace=replace,
        rates=rates,
    )
    return HicachePrefetchReqInput(order=encode_order(order))
