"""SGLang's HTTP process: its workers, keys, LoRA adapters, and the routes that make prompts."""

import asyncio
import copy
from array import array
from typing import Any, NamedTuple

from toolgap.protocol import Api


def http_workers() -> int:
    """How many HTTP processes the server has. News of an operation reaches the one that submitted it."""
    from sglang.srt.runtime_context import get_serving

    return int(get_serving().tokenizer_worker_num)


def denied_status(method: str, path: str, authorization: str | None) -> int | None:
    """The status with which SGLang's own ``/hicache/*`` routes refuse such a caller; None if they do not.

    With several tokenizer workers SGLang itself asks no caller for a key, on any route.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    serving = get_serving()
    decision = decide_request_auth(
        method=method,
        path=path,
        authorization_header=authorization,
        api_key=serving.api_key,
        admin_api_key=serving.admin_api_key,
        auth_level=AuthLevel.ADMIN_OPTIONAL,
    )
    return None if decision.allowed else int(decision.error_status_code)


def loaded_adapters(tokenizer_manager: Any) -> dict[str, str] | None:
    """In the HTTP process: ids of the loaded LoRA adapters by name; None on a server without LoRA.

    SGLang appends the id to a request's extra key. An adapter gets another id each time it is loaded at
    run time, so one that is not loaded now has no KV that a request could use. Looking counts as no use
    of an adapter: SGLang may evict and unload it as if nothing had been asked.
    """
    if not tokenizer_manager.enable_lora:
        return None
    adapters = tokenizer_manager.lora_registry.get_all_adapters()
    return {name: adapter.lora_id for name, adapter in adapters.items()}


class PromptError(ValueError):
    """SGLang's chat route would refuse a request; ``field`` is the one that is wrong, if it is known."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatPrompt(NamedTuple):
    """What SGLang's chat route makes of a request's body."""

    token_ids: "array[int]"
    lora_path: str | None
    has_media: bool


class ChatRoute:
    """In the HTTP process: SGLang's chat routes, as far as they make prompts.

    Args:
        app: SGLang's FastAPI application, once it has started.
        tokenizer_manager: SGLang's.
    """

    def __init__(self, app: Any, tokenizer_manager: Any) -> None:
        self._app = app
        self._tokenizer_manager = tokenizer_manager

    async def render(self, api: Api, body: dict[str, Any]) -> ChatPrompt:
        """The prompt of a request with this body, as its route would make it.

        Raises:
            PromptError: the route would refuse it.
        """
        request = await asyncio.to_thread(self._convert, api, body)
        token_ids = request.input_ids
        if token_ids is None:
            token_ids, _ = await self._tokenizer_manager._tokenize_texts(request.text)
        has_media = any((request.image_data, request.video_data, request.audio_data))
        return ChatPrompt(array("q", token_ids), request.lora_path, has_media)

    def _convert(self, api: Api, body: dict[str, Any]) -> Any:
        from fastapi import HTTPException
        from pydantic import ValidationError
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from sglang.srt.entrypoints.openai.encoding_dsv32 import DS32EncodingError
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        chat = self._app.state.openai_serving_chat
        body = copy.deepcopy(body)  # SGLang's validators write into it
        try:
            if api is Api.ANTHROPIC:
                body = {"model": self._tokenizer_manager.served_model_name, "max_tokens": 1} | body
                lora_path = body.pop("lora_path", None)
                message = AnthropicMessagesRequest.model_validate(body)
                request = self._app.state.anthropic_serving._convert_to_chat_completion_request(message)
                request.lora_path = lora_path
            else:
                request = ChatCompletionRequest.model_validate(body)
            if problem := chat._validate_request(request):
                raise PromptError(problem)
            converted, _ = chat._convert_to_internal_request(request)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            field = str(first["loc"][0]) if first["loc"] else None
            raise PromptError(f"{first['msg']} (at {place})", field) from None
        except HTTPException as error:
            raise PromptError(str(error.detail)) from None
        except (ValueError, DS32EncodingError) as error:
            raise PromptError(str(error), getattr(error, "field", None)) from None
        return converted
