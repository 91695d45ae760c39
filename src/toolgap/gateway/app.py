"""The gateway as an ASGI application: the proxy, and beside it what operates it."""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from toolgap.gateway import hints
from toolgap.gateway.config import Config
from toolgap.gateway.connections import Connections
from toolgap.gateway.events import Listener
from toolgap.gateway.logs import log_event, log_exchange
from toolgap.gateway.metrics import Metrics
from toolgap.gateway.observer import Recorder, Watcher
from toolgap.gateway.observing import Observer, Observing
from toolgap.gateway.page import Timeline
from toolgap.gateway.page import routes as page_routes
from toolgap.gateway.policy import Settings
from toolgap.gateway.proxy import Exchange, Limits, Proxy
from toolgap.gateway.restoring import Restoring
from toolgap.gateway.sessions import Sessions
from toolgap.gateway.upstreams import Upstream, Upstreams

CLOSING_S = 5.0
"""How long what is cut off, and the observer, may take to come to an end."""


def limits(config: Config) -> Limits:
    """The proxy's part of the settings."""
    return Limits(
        max_body_bytes=config.max_body_bytes,
        max_observed_body_bytes=config.max_observed_body_bytes,
        connect_timeout_s=config.connect_timeout_s,
        read_timeout_s=config.read_timeout_s or None,
        write_timeout_s=config.write_timeout_s or None,
    )


def clock() -> Callable[[], float]:
    """Unix time, in seconds, that never jumps, whatever is done to the machine's clock."""
    ahead_s = time.time() - time.monotonic()
    return lambda: ahead_s + time.monotonic()


def restoring_of(config: Config, upstreams: Upstreams, listeners: Iterable[Listener]) -> Restoring:
    """What restores for a gateway with these settings."""

    def place(affinity: str) -> Sequence[str]:
        return config.workers or [upstreams.order(affinity)[0].url]

    return Restoring(
        place,
        settings=Settings(
            when=config.when, lease_s=config.lease_s, max_conversations=config.max_conversations
        ),
        told_s=config.told_s,
        api_key=config.api_key,
        timeout_s=config.restore_timeout_s,
        retry_for_s=config.retry_for_s,
        listeners=listeners,
        clock=clock(),
    )


def application(
    config: Config, observer: Observer | None = None, recording: Recorder | None = None
) -> Starlette:
    """The gateway. Its lifespan checks the upstreams, and ends the threads.

    Args:
        config: The settings.
        observer: Looks at what passes, in place of what the settings say.
        recording: Gets every whole turn; stays the caller's to close.
    """
    metrics = Metrics(config.upstreams)
    if recording is not None:
        metrics.show_recording(recording)
    upstreams = Upstreams(
        [
            Upstream(url, Connections(max_idle=config.max_idle_connections, idle_s=config.idle_s))
            for url in config.upstreams
        ],
        check_path=config.check_path,
        check_interval_s=config.check_interval_s,
        check_timeout_s=config.check_timeout_s,
        on_change=lambda upstream: changed(upstream),
    )
    restoring: Restoring | None = None
    timeline = Timeline(clock()) if config.page and config.restore else None
    if observer is None and config.restore:
        listeners: list[Listener] = [metrics.listen, log_event]
        if timeline is not None:
            listeners.append(timeline.listen)
        restoring = restoring_of(config, upstreams, listeners)
    if observer is None and (restoring is not None or recording is not None):
        observer = Watcher(
            restoring,
            Sessions(config.max_conversations),
            recording=recording,
            replicas=config.replicas,
            routed=bool(config.workers),
            clock=clock(),
        )
    observing = None
    if observer is not None:
        observing = Observing(
            observer,
            max_backlog_bytes=config.max_backlog_bytes,
            session_timeout_s=config.session_timeout_s,
            asks_for_places=config.replicas > 1 or bool(config.workers),
            on_error=metrics.observer_errors.inc,
            on_unseen=metrics.unseen.inc,
        )

    def changed(upstream: Upstream) -> None:
        metrics.health_changed(upstream)
        if restoring is not None:
            restoring.upstreams_changed()

    def ended(exchange: Exchange) -> None:
        metrics.ended(exchange)
        log_exchange(exchange)

    proxy = Proxy(upstreams, limits(config), observing=observing, on_begin=metrics.began, on_end=ended)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        health = {one.url: one.health.value for one in upstreams.all}
        return JSONResponse({"upstreams": health}, 200 if upstreams.is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(upstreams.check_for_ever)
            yield
            group.cancel_scope.cancel()
        # What was cut off still has its end to tell.
        with anyio.move_on_after(CLOSING_S):
            await proxy.idle()
        await upstreams.aclose()
        if observing is not None:
            await anyio.to_thread.run_sync(observing.close, CLOSING_S)
        if restoring is not None:
            await anyio.to_thread.run_sync(restoring.close, CLOSING_S)

    routes: list[BaseRoute] = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", show_metrics),
    ]
    if restoring is not None:
        routes.append(Route(hints.PATH, hints.endpoint(restoring), methods=["POST"]))
    if timeline is not None:
        routes += page_routes(timeline)
    app = Starlette(routes=routes, lifespan=lifespan)
    # Whatever is none of these is the upstream's, also what has no path at all, as in OPTIONS *.
    app.router.default = proxy
    app.router.redirect_slashes = False
    return app
