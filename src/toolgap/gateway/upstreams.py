"""The servers behind the gateway: which of them gets a request, and how they are."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import anyio
import httpx

logger = logging.getLogger("toolgap.gateway")


class Health(StrEnum):
    """What the last check, or the last request, found."""

    UNKNOWN = "unknown"
    UP = "up"
    DRAINING = "draining"
    """It answers its check with an error of its own (503, as a server does that stops): it gets requests
    only if no other can take them. What runs on it goes on."""
    DOWN = "down"


_PREFERENCE = {Health.UP: 0, Health.UNKNOWN: 0, Health.DRAINING: 1, Health.DOWN: 2}


class Upstream:
    """One server.

    Args:
        url: Its base URL; validated by the configuration.
        transport: Its own pool of connections.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport) -> None:
        self.url = url
        self.parsed = httpx.URL(url)
        self.host = self.parsed.netloc
        self.prefix = self.parsed.raw_path.rstrip(b"/")
        """What comes before the path of every request."""
        self.transport = transport
        self.health = Health.UNKNOWN
        self.in_flight = 0

    def target(self, raw_path: bytes, query: bytes) -> bytes:
        """The target of a request as the client wrote it, below the base URL."""
        return self.prefix + raw_path + (b"?" + query if query else b"")


def weight(key: str, url: str) -> bytes:
    """How much a key is drawn to a server: the same in every gateway, and independent of all other servers."""
    return hashlib.blake2b(f"{key}\0{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def order(upstreams: Sequence[Upstream], key: str | None) -> list[Upstream]:
    """Who is asked first, second, and so on.

    Healthy ones come before draining ones, and those before those that do not answer. Among equals it is
    rendezvous hashing: a key goes to the same server whatever becomes of the others. Without a key the least
    busy is first.
    """
    if key is None:
        return sorted(upstreams, key=lambda one: (_PREFERENCE[one.health], one.in_flight))
    drawn = sorted(upstreams, key=lambda one: weight(key, one.url), reverse=True)
    return sorted(drawn, key=lambda one: _PREFERENCE[one.health])


class Upstreams:
    """All servers, and the checks of their health.

    Args:
        upstreams: At least one.
        check_path: What is asked of them, as in ``/health``; any answer below 500 says that they are up.
        check_interval_s: How long after one check the next one comes.
        check_timeout_s: The longest that they may take to answer.
        on_change: Called when the health of one changes.
    """

    def __init__(
        self,
        upstreams: Iterable[Upstream],
        *,
        check_path: str,
        check_interval_s: float,
        check_timeout_s: float,
        on_change: Callable[[Upstream], None] = lambda _: None,
    ) -> None:
        self.all = list(upstreams)
        self._check_path = check_path.encode()
        self._check_interval_s = check_interval_s
        self._check_timeout_s = check_timeout_s
        self._on_change = on_change

    def order(self, key: str | None) -> list[Upstream]:
        """As the function of this name, of all."""
        return order(self.all, key)

    @property
    def is_ready(self) -> bool:
        """Whether one of them is up."""
        return any(one.health is Health.UP for one in self.all)

    def found(self, upstream: Upstream, health: Health) -> None:
        """Take note of how a server is."""
        if health is upstream.health:
            return
        level = logging.INFO if health is Health.UP else logging.WARNING
        logger.log(level, "upstream %s is %s", upstream.url, health)
        upstream.health = health
        self._on_change(upstream)

    async def check(self, upstream: Upstream) -> None:
        """Ask one server how it is."""
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), self._check_timeout_s)
        target = upstream.target(self._check_path, b"")
        request = httpx.Request(
            "GET",
            upstream.parsed,
            headers=[(b"host", upstream.host)],
            stream=httpx.ByteStream(b""),
            extensions={"timeout": timeout, "target": target},
        )
        health = Health.DOWN
        try:
            # Of one read each of those timeouts is the limit, of a whole answer this is.
            with anyio.fail_after(self._check_timeout_s):
                response = await upstream.transport.handle_async_request(request)
                try:
                    health = Health.UP if response.status_code < 500 else Health.DRAINING
                    async for _ in response.stream:  # type: ignore[union-attr]
                        pass
                finally:
                    with anyio.CancelScope(shield=True):
                        await response.aclose()
        except (httpx.HTTPError, TimeoutError, OSError):
            health = Health.DOWN
        self.found(upstream, health)

    async def check_for_ever(self) -> None:
        """Check all of them, again and again; one that takes its time delays no other."""
        async with anyio.create_task_group() as group:
            for upstream in self.all:
                group.start_soon(self._check_for_ever, upstream)

    async def _check_for_ever(self, upstream: Upstream) -> None:
        while True:
            await self.check(upstream)
            await anyio.sleep(self._check_interval_s)

    async def aclose(self) -> None:
        """Close all connections."""
        for upstream in self.all:
            await upstream.transport.aclose()
