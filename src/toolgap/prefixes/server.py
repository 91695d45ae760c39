"""What the check asks the server: which tokens a request's prompt is, and which text tokens are."""

from collections.abc import Sequence
from typing import Any, Self

import httpx

from toolgap.client import Toolgap, ToolgapError, ToolgapUnreachable, connection
from toolgap.prefixes.parts import Body
from toolgap.protocol import PROMPT_FIELDS, Api

NAMESPACE_FIELDS = ("extra_key", "cache_salt", "lora_path", "routed_dp_rank")

DETOKENIZE_PATH = "/detokenize"
DETOKENIZE_TIMEOUT_S = 60.0

MOST_RENDERINGS = 64
"""Renderings kept: a session's prompts grow, and each is used for two pairs and some trials only."""


class Renderer:
    """Prompts as the server renders them; use as a context manager.

    Args:
        url: The server.
        api_key: As :class:`toolgap.client.Toolgap` takes it.
        text_api_key: For SGLang's own route for texts; the same if left out. They differ on a server that has an
            admin API key and an API key.

    Raises:
        ValueError: the URL or the key cannot be used.
    """

    def __init__(self, url: str, api_key: str | None = None, text_api_key: str | None = None) -> None:
        self._toolgap = Toolgap(url, api_key=api_key)
        self._http = httpx.Client(**connection(url, text_api_key or api_key), timeout=DETOKENIZE_TIMEOUT_S)
        self._url = url
        self._rendered: dict[tuple[Api | None, str], list[int]] = {}

    def page_tokens(self) -> int:
        """Tokens a page of the server's cache."""
        return self._toolgap.overview().engine.page_tokens

    def ids(self, body: Body, api: Api | None) -> list[int]:
        """Token ids of a request's prompt.

        Raises:
            ToolgapError: the server refuses such a request.
            ToolgapUnreachable: no answer from Toolgap.
        """
        fields: dict[str, Any] = {
            field: body[field] for field in (*PROMPT_FIELDS, *NAMESPACE_FIELDS) if body.get(field) is not None
        }
        # Equal bodies with their keys in another order are different prompts, and different texts.
        key = (api, repr(fields))
        if key not in self._rendered:
            while len(self._rendered) >= MOST_RENDERINGS:
                del self._rendered[next(iter(self._rendered))]
            self._rendered[key] = list(self._toolgap.resolve(api=api, **fields).token_ids)
        return self._rendered[key]

    def ids_if_valid(self, body: Body, api: Api | None) -> list[int] | None:
        """As :meth:`ids`; None if the server refuses such a request."""
        try:
            return self.ids(body, api)
        except ToolgapError:
            return None

    def texts(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of tokens, special tokens included.

        Raises:
            ToolgapUnreachable: the server does not answer, or not with texts.
        """
        full = [list(ids) for ids in lists if ids]
        try:
            reply = self._http.post(DETOKENIZE_PATH, json={"tokens": full, "skip_special_tokens": False})
        except httpx.TransportError as error:
            raise ToolgapUnreachable(f"no answer from {self._url}: {error}") from error
        if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ToolgapUnreachable(
                f"{self._url}{DETOKENIZE_PATH} answered {reply.status_code}: it wants SGLang's API key, which is not "
                "its admin API key (--text-api-key)",
                reply.status_code,
            )
        if reply.status_code != httpx.codes.OK:
            raise ToolgapUnreachable(
                f"{self._url}{DETOKENIZE_PATH} answered {reply.status_code}: {reply.text[:200]!r}",
                reply.status_code,
            )
        decoded = iter(reply.json()["text"])
        return [str(next(decoded)) if ids else "" for ids in lists]

    def close(self) -> None:
        """Close connections."""
        self._toolgap.close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
