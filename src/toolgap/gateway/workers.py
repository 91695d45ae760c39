"""The workers that are asked to restore: one client for each and each key, and whom to leave alone for a while."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from toolgap.client import AsyncToolgap, PrefixFields, SubmitFields, ToolgapError, ToolgapUnreachable
from toolgap.hooks.restores import UNKNOWN_NAME
from toolgap.protocol import OperationStatus

MAX_CLIENTS = 64

QUIET_S = {404: 30.0, 405: 30.0, 401: 30.0, 403: 30.0}
"""How long a worker is left alone after such an answer: it will not be another so soon."""

QUIET_UNREACHABLE_S = 2.0


class WorkerQuietError(Exception):
    """A worker could not be asked a short time ago, and is not asked again yet; the text is the code of why."""


def code_of(error: Exception) -> str:
    """Why a restore was refused, in a word for metrics and log."""
    match error:
        case ToolgapError():
            return error.error.code.value
        case ToolgapUnreachable(status_code=404 | 405):
            return "no_toolgap"
        case ToolgapUnreachable(status_code=401 | 403):
            return "unauthorized"
        case ToolgapUnreachable(status_code=None) | TimeoutError():
            return "unreachable"
        case ToolgapUnreachable():
            return "bad_answer"
        case WorkerQuietError():
            return str(error)
        case _:
            return "fault"


class Workers:
    """Clients of the workers, for one event loop.

    Args:
        timeout_s: For connecting and for every reply, beyond what it is asked to wait.
        clock: Monotonic, in seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._clients: OrderedDict[tuple[str, str | None], AsyncToolgap] = OrderedDict()
        self._quiet: dict[tuple[str, str | None], tuple[float, str]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def submit(
        self, urls: Sequence[str], key: str | None, names: Iterable[PrefixFields], fields: SubmitFields
    ) -> tuple[str, OperationStatus]:
        """Submit to the first worker that knows a name of the prefix.

        Args:
            urls: Of the workers, the likeliest first. With several only the one that served the turn knows its
                request, so that the others are asked by request alone.
            key: The API key, if any.
            names: Of the prefix, the most exact one first.
            fields: The rest of the submit.

        Returns:
            The worker's URL, and its answer.

        Raises:
            ToolgapError, ToolgapUnreachable, WorkerQuietError: as the last of them says.
        """
        failure: Exception | None = None
        names = [name for name in names if len(urls) == 1 or name.get("request_id") is not None]
        for url in urls:
            for name in names:
                try:
                    return url, await self._ask(url, key, {**fields, **name})
                except ToolgapError as error:
                    failure = error
                    if error.error.code not in UNKNOWN_NAME:
                        raise
                except (ToolgapUnreachable, WorkerQuietError) as error:
                    failure = error
                    break
        raise failure or WorkerQuietError("no_name")

    async def status(
        self, url: str, key: str | None, operation_id: str, wait_s: float | None = None
    ) -> OperationStatus:
        """As :meth:`AsyncToolgap.status`."""
        return await self._client(url, key).status(operation_id, wait_s)

    async def cancel(self, url: str, key: str | None, operation_id: str) -> OperationStatus:
        """As :meth:`AsyncToolgap.cancel`."""
        return await self._client(url, key).cancel(operation_id)

    async def close(self) -> None:
        """Close all connections."""
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients), *self._closing)

    async def _ask(self, url: str, key: str | None, fields: SubmitFields) -> OperationStatus:
        until_s, why = self._quiet.get((url, key), (0.0, ""))
        if self._clock() < until_s:
            raise WorkerQuietError(why)
        try:
            status = await self._client(url, key).submit(retry_for_s=0, **fields)
        except ToolgapUnreachable as error:
            quiet_s = QUIET_S.get(error.status_code or 0, QUIET_UNREACHABLE_S)
            self._quiet[url, key] = (self._clock() + quiet_s, code_of(error))
            raise
        self._quiet.pop((url, key), None)
        return status

    def _client(self, url: str, key: str | None) -> AsyncToolgap:
        client = self._clients.get((url, key))
        if client is None:
            client = self._clients[url, key] = AsyncToolgap(url, api_key=key, timeout_s=self._timeout_s)
        self._clients.move_to_end((url, key))
        while len(self._clients) > MAX_CLIENTS:
            pair, oldest = self._clients.popitem(last=False)
            self._quiet.pop(pair, None)
            # What it has under way breaks off, and counts as unreachable.
            closing = asyncio.get_running_loop().create_task(oldest.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return client
