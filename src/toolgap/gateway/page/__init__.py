"""The live page: what conversations' gaps were used for. Built from events, and nothing else depends on it."""

from toolgap.gateway.page.routes import routes
from toolgap.gateway.page.timeline import Timeline

__all__ = ["Timeline", "routes"]
