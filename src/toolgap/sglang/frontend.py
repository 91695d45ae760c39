"""In SGLang's HTTP process: the route, what it needs to resolve a prefix, and replies from the scheduler."""

import asyncio
import contextlib
import logging
import math
import sys
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from fastapi import Request
from starlette.responses import JSONResponse, Response

from toolgap import protocol
from toolgap.protocol import (
    Cancel,
    Code,
    ErrorReply,
    NamedPrefix,
    Refused,
    Resolve,
    Resolved,
    Status,
    Submit,
    Target,
    decode_command,
)
from toolgap.settings import Settings
from toolgap.sglang import replicas
from toolgap.sglang.internals import http, process
from toolgap.sglang.internals.http import denied_status, http_workers, loaded_adapters
from toolgap.sglang.messages import (
    CancelOperation,
    Describe,
    HicachePrefetchReqInput,
    HicachePrefetchReqOutput,
    Order,
    Quiesce,
    Recall,
    Recalled,
    Restore,
    encode_order,
)
from toolgap.sglang.prompts import name_by_messages

logger = logging.getLogger(__name__)

_frontend: "Frontend | None" = None
_settings = Settings()
_unready: Callable[[], list[str]] = list


def configure(settings: Settings, unready: Callable[[], list[str]]) -> None:
    """Set what hooks of this process use.

    Args:
        settings: The plugin's settings.
        unready: Names the hooks that are not in, once SGLang has applied them all.
    """
    global _settings, _unready
    _settings, _unready = settings, unready


# ---- hooks ----


def init_communicators(_result: Any, tokenizer_manager: Any) -> None:
    """After `TokenizerControlMixin.init_communicators`: take replies, and add the route to SGLang's app."""
    from sglang.utils import TypeBasedDispatcher

    global _frontend
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None:  # the offline engine has no HTTP app
        return
    _frontend = Frontend(tokenizer_manager, server, _settings)
    tokenizer_manager._result_dispatcher += TypeBasedDispatcher(
        [(HicachePrefetchReqOutput, _frontend.replies.receive)]
    )
    _frontend.add_route()


async def change_storage(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Around attaching, detaching and clearing storage: submits that arrive meanwhile are refused."""
    if _frontend is None:
        return await original(*args, **kwargs)
    with _frontend.replacing_storage():
        return await original(*args, **kwargs)


async def release_memory(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Around `release_memory_occupation`, which ends the scheduler unless it is idle.

    Raises:
        RuntimeError: a storage call of a restore hangs; SGLang answers 400 with this text.
    """
    if _frontend is not None and _frontend.obstacle() is None:
        reply = replicas.first_refusal(await _frontend.ask_all(Quiesce()))
        if reply.status != 200:
            raise RuntimeError(msgspec.json.decode(reply.body, type=ErrorReply).error.message)
    return await original(*args, **kwargs)


# ---- replies ----


class _Call:
    """Replies that came to a call, and the future that they are for once there are enough."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.replies: list[HicachePrefetchReqOutput] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, reply: HicachePrefetchReqOutput) -> None:
        self.replies.append(reply)
        if len(self.replies) == self.expected and not self.done.done():
            self.done.set_result(None)


class Replies:
    """Matches the scheduler's replies to calls, and its news to those who wait for an operation."""

    def __init__(self, tokenizer_manager: Any, timeout_s: float) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._timeout_s = timeout_s
        self._calls: dict[str, _Call] = {}
        self._waiters: dict[str, set[asyncio.Future[HicachePrefetchReqOutput]]] = {}

    def receive(self, output: HicachePrefetchReqOutput) -> None:
        """A message from a scheduler. A reply to a call that waits no more is dropped."""
        if output.rid is not None:
            if (call := self._calls.get(output.rid)) is not None:
                call.add(output)
            return
        for future in self._waiters.get(output.operation_id or "", set()):
            if not future.done():
                future.set_result(output)

    async def ask(
        self, order: Order, token_ids: bytes = b"", *, expected: int = 1
    ) -> list[HicachePrefetchReqOutput]:
        """Send an order to the schedulers and wait for their replies.

        Args:
            order: Every replica gets it.
            token_ids: What goes with it.
            expected: How many replicas answer it.

        Raises:
            Refused: ``engine_busy`` if not all came in time.
        """
        rid = f"toolgap-{_new_id()}"
        call = self._calls[rid] = _Call(expected)
        try:
            self._tokenizer_manager.auto_create_handle_loop()
            self._tokenizer_manager._dispatch_to_scheduler(
                HicachePrefetchReqInput(rid=rid, order=encode_order(order), token_ids=token_ids)
            )
            await asyncio.wait_for(call.done, self._timeout_s)
        except TimeoutError:
            who = (
                "the scheduler did not answer"
                if expected == 1
                else f"{len(call.replies)} of {expected} replicas answered"
            )
            raise Refused(Code.ENGINE_BUSY, f"{who} in {self._timeout_s:g} s", retry_after_s=1.0) from None
        finally:
            del self._calls[rid]
        return call.replies

    @contextlib.contextmanager
    def waiting(self, operation_id: str) -> Any:
        """A future that is set when the operation ends; open it before asking for the status."""
        future: asyncio.Future[HicachePrefetchReqOutput] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(operation_id, set()).add(future)
        try:
            yield future
        finally:
            waiters = self._waiters[operation_id]
            waiters.discard(future)
            if not waiters:
                del self._waiters[operation_id]
            future.cancel()

    @property
    def pending(self) -> int:
        """Calls and long polls that wait now."""
        return len(self._calls) + sum(map(len, self._waiters.values()))


# ---- the route ----


class Resolution(NamedTuple):
    """Which prefix a call names."""

    token_ids: "array[int]"
    extra_key: str | None
    cache_salt: str | None
    stable_tokens: int | None = None
    dp_rank: int | None = None
    """The replica that served the request which the prefix was named by."""


class Frontend:
    """The endpoint of one HTTP process."""

    def __init__(self, tokenizer_manager: Any, server: Any, settings: Settings) -> None:
        self.tokenizer_manager = tokenizer_manager
        self.server = server
        self.settings = settings
        self.replies = Replies(tokenizer_manager, settings.reply_timeout_s)
        self.chat = http.ChatRoute(server.app, tokenizer_manager)
        self._storage_changes = 0

    def add_route(self) -> None:
        """Add the route, under the authorisation of SGLang's own ``/hicache/*`` routes."""
        from sglang.srt.utils.auth import AuthLevel, auth_level

        @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
        async def hicache_prefetch(request: Request) -> Response:
            """Restore a prefix from storage into host memory: submit, status, cancel."""
            # SGLang's middleware has asked already, but there is none with several tokenizer workers.
            status = denied_status(request.method, request.url.path, request.headers.get("Authorization"))
            if status is not None:
                return JSONResponse({"error": HTTPStatus(status).phrase}, status)
            return await self.answer(request)

        self.server.app.add_api_route(protocol.PATH, hicache_prefetch, methods=["POST"])

    @contextlib.contextmanager
    def replacing_storage(self) -> Any:
        """While open, submits are refused."""
        self._storage_changes += 1
        try:
            yield
        finally:
            self._storage_changes -= 1

    def obstacle(self) -> str | None:
        """Why this server has no restores at all; None if the scheduler announced its hooks."""
        if obstacle := process.parallel_obstacle():
            return obstacle
        if missing := _unready():
            return f"SGLang could not apply toolgap's hooks: {', '.join(missing)}"
        info = self.server.get_global_state().scheduler_info.get("toolgap")
        if info is None:
            return (
                "the scheduler did not announce toolgap: its log says why "
                "(another SGLang release, a bad TOOLGAP_ setting, or SGLANG_PLUGINS)"
            )
        if info["missing"]:
            return f"the scheduler could not apply toolgap's hooks: {', '.join(info['missing'])}"
        if info["protocol"] != protocol.VERSION:
            return "the scheduler runs another release of toolgap than the HTTP process"
        return None

    async def answer(self, request: Request) -> Response:
        """One call of the endpoint."""
        try:
            reply = self._with_text(await self._dispatch(request))
        except Refused as refusal:
            reply = _refusal(refusal)
        except Exception:
            logger.exception("toolgap: a call failed")
            reply = _refusal(Refused(Code.INTERNAL_ERROR, "a fault in toolgap; see the server's log"))
        headers = (
            {}
            if reply.retry_after_s is None
            else {"Retry-After": str(max(1, math.ceil(reply.retry_after_s)))}
        )
        return Response(reply.body, reply.status, headers, media_type="application/json")

    async def _dispatch(self, request: Request) -> HicachePrefetchReqOutput:
        body = await self._read_body(request)
        command = decode_command(body)
        if obstacle := self.obstacle():
            raise Refused(Code.NOT_SUPPORTED, obstacle)
        match command:
            case Submit():
                return await self._submit(command)
            case Resolve():
                return self._tell(await self._resolve(command))
            case Status(operation_id=str(operation_id), wait_s=float(wait_s)) if wait_s > 0:
                return await self._wait(request, operation_id, wait_s)
            case Status(operation_id=operation_id):
                return await self._describe(operation_id)
            case Cancel(operation_id=operation_id):
                return replicas.that_knows(await self.ask_all(CancelOperation(operation_id=operation_id)))

    def _with_text(self, reply: HicachePrefetchReqOutput) -> HicachePrefetchReqOutput:
        """Decode the tokens at which requests left prefixes: schedulers have no tokenizer."""
        tokenizer = self.tokenizer_manager.tokenizer
        if tokenizer is None or b'"submitted_ids"' not in reply.body:
            return reply
        body = msgspec.json.decode(reply.body)
        for status in [body, *body.get("active", ()), *body.get("recent", ())]:
            if divergence := status.get("divergence"):
                for side in ("submitted", "prompted"):
                    divergence[f"{side}_text"] = tokenizer.decode(divergence[f"{side}_ids"])
        reply.body = msgspec.json.encode(body)
        return reply

    async def ask_all(self, order: Order) -> list[HicachePrefetchReqOutput]:
        """The replies of all replicas to an order."""
        return await self.replies.ask(order, expected=process.replicas())

    async def _describe(self, operation_id: str | None) -> HicachePrefetchReqOutput:
        answers = await self.ask_all(Describe(operation_id=operation_id))
        return replicas.overview(answers) if operation_id is None else replicas.that_knows(answers)

    async def _read_body(self, request: Request) -> bytes:
        limit = self.settings.max_body_bytes
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise Refused(
                    Code.BODY_TOO_LARGE,
                    f"the body is larger than {limit} bytes (TOOLGAP_MAX_BODY_BYTES)",
                )
        return bytes(body)

    async def _submit(self, submit: Submit) -> HicachePrefetchReqOutput:
        if self._storage_changes:
            raise Refused(Code.STORAGE_REPLACED, "the storage backend is being replaced", retry_after_s=1.0)
        named = await self._resolve(submit)
        dp_rank = named.dp_rank if submit.routed_dp_rank is None else submit.routed_dp_rank
        ttl_s = self.settings.default_ttl_s if submit.ttl_s is None else submit.ttl_s
        gap_s = ttl_s if submit.expected_gap_s is None else submit.expected_gap_s
        order = Restore(
            operation_id=submit.operation_id or _new_id(),
            extra_key=named.extra_key,
            cache_salt=named.cache_salt,
            ttl_s=ttl_s,
            namespace=submit.namespace,
            deadline_ts=time.time() + gap_s,
            gap_s=gap_s,
            force=bool(submit.force),
            target=submit.target or Target.HOST,
            lease_s=submit.lease_s,
            dp_rank=replicas.check_replica(dp_rank, process.replicas()),
            stable_tokens=named.stable_tokens,
        )
        [reply] = await self.replies.ask(order, named.token_ids.tobytes())
        return reply

    @staticmethod
    def _tell(named: Resolution) -> HicachePrefetchReqOutput:
        stable_tokens = named.stable_tokens
        resolved = Resolved(
            token_ids=list(named.token_ids),
            stable_tokens=stable_tokens,
            expected_tokens=None if stable_tokens is None else len(named.token_ids) - stable_tokens,
        )
        return HicachePrefetchReqOutput(status=200, body=msgspec.json.encode(resolved))

    async def _resolve(self, prefix: NamedPrefix) -> Resolution:
        """The prefix's token ids, checked as SGLang's routes would, and its namespace."""
        if prefix.request_id is not None:
            return await self._recall(prefix.request_id)
        stable_tokens, lora_path = None, prefix.lora_path
        if prefix.input_ids is not None:
            field, token_ids = "input_ids", array("q", prefix.input_ids)
            self._check_vocabulary(token_ids)
        elif prefix.messages is not None:
            field = "messages"
            self._check_tokenizer(field)
            token_ids, stable_tokens, lora_path = await name_by_messages(self.chat, prefix)
        else:
            field = "text"
            self._check_tokenizer(field)
            ids, _ = await self.tokenizer_manager._tokenize_texts(prefix.text)
            token_ids = array("q", ids)
        limit = self.tokenizer_manager.context_len
        if len(token_ids) > limit:
            raise Refused(
                Code.INVALID_FIELD,
                f"{field} has {len(token_ids)} tokens, and the model's context length is {limit}",
                field=field,
            )
        extra_key = self._resolve_extra_key(prefix.extra_key, lora_path)
        return Resolution(token_ids, extra_key, prefix.cache_salt, stable_tokens)

    async def _recall(self, request_id: str) -> Resolution:
        """The tokens of a recent request, as the scheduler that served it has them."""
        reply = replicas.first_success(await self.ask_all(Recall(request_id=request_id)))
        if reply.status != 200:
            message = msgspec.json.decode(reply.body, type=ErrorReply).error.message
            if reply.status == HTTPStatus.NOT_FOUND:
                raise Refused(Code.UNKNOWN_REQUEST, message, field="request_id")
            raise Refused(Code.INTERNAL_ERROR, message)
        recalled = msgspec.msgpack.decode(reply.body, type=Recalled)
        token_ids = array("q")
        token_ids.frombytes(recalled.token_ids)
        return Resolution(
            token_ids, recalled.extra_key, recalled.cache_salt, recalled.prompt_tokens, recalled.dp_rank
        )

    def _check_vocabulary(self, token_ids: "array[int]") -> None:
        vocabulary = self.tokenizer_manager.model_config.vocab_size
        if max(token_ids) >= vocabulary:
            position = next(i for i, token in enumerate(token_ids) if token >= vocabulary)
            raise Refused(
                Code.INVALID_FIELD,
                f"input_ids[{position}] is {token_ids[position]}, and the vocabulary has {vocabulary} tokens",
                field="input_ids",
            )

    def _check_tokenizer(self, field: str) -> None:
        if self.tokenizer_manager.tokenizer is None:
            raise Refused(
                Code.NOT_SUPPORTED,
                f"{field}: the server runs without a tokenizer: send input_ids",
                field=field,
            )

    def _resolve_extra_key(self, extra_key: str | None, lora_path: str | None) -> str | None:
        """The extra key that SGLang gives a request with this extra key and adapter."""
        if not lora_path:  # as SGLang takes an empty one
            return extra_key
        loaded = loaded_adapters(self.tokenizer_manager)
        if loaded is None:
            raise Refused(
                Code.NOT_SUPPORTED,
                f"LoRA adapter {lora_path!r} was named, and the server runs without LoRA: start it with "
                "--enable-lora",
                field="lora_path",
            )
        lora_id = loaded.get(lora_path)
        if lora_id is None:
            raise Refused(
                Code.INVALID_FIELD,
                f"no LoRA adapter {lora_path!r} is loaded, so no KV of it can be found; loaded are: "
                f"{', '.join(map(repr, loaded)) or 'none'}",
                field="lora_path",
            )
        return (extra_key or "") + lora_id

    async def _wait(self, request: Request, operation_id: str, wait_s: float) -> HicachePrefetchReqOutput:
        """Long poll: answer when the operation ends, when the time is up, or not at all if the client left."""
        with self.replies.waiting(operation_id) as ended:
            reply = await self._describe(operation_id)
            async with _disconnection(request) as gone:
                # News goes to the HTTP process that submitted the operation: where there are several,
                # another one has to look again.
                for pause_s in _pauses(wait_s) if http_workers() > 1 else (wait_s,):
                    if reply.status != 200 or reply.ended or gone.done():
                        break
                    await asyncio.wait({ended, gone}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        news: HicachePrefetchReqOutput = ended.result()
                        return news
                    reply = await self._describe(operation_id)
            return reply


def _pauses(total_s: float) -> Iterator[float]:
    """Pauses that add up to a total; the first ones are short, because most restores are."""
    pause_s = 0.02
    while total_s > 0:
        pause_s = min(pause_s, total_s)
        yield pause_s
        total_s -= pause_s
        pause_s = min(2 * pause_s, 0.5)


def _new_id() -> str:
    return uuid.uuid4().hex


def _refusal(refusal: Refused) -> HicachePrefetchReqOutput:
    return HicachePrefetchReqOutput(
        status=refusal.status,
        body=msgspec.json.encode(ErrorReply(error=refusal.error)),
        retry_after_s=refusal.error.retry_after_s,
    )


@contextlib.asynccontextmanager
async def _disconnection(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is done once the client has left."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
