"""A custom logger of LiteLLM (``pip install 'toolgap[litellm]'``)::

    litellm.callbacks = [ToolgapLogger("http://127.0.0.1:30000")]

LiteLLM sees requests, not tools: an answer with tool calls submits, the next request of the conversation,
which brings their results, is taken for their end. An agent that tells :meth:`ToolgapLogger.tool_ended`
refreshes earlier.
"""

import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

from litellm.integrations.custom_logger import CustomLogger

from toolgap.client import DEFAULT_URL, PrefixFields, Toolgap
from toolgap.hooks.restores import Call, Restores, as_restores
from toolgap.hooks.tool_calls import Answer, Message
from toolgap.protocol import PROMPT_FIELDS

MAX_CALLS = 4096


class ToolgapLogger(CustomLogger):
    """Restores what a conversation's next request will begin with, while its tools run.

    Args:
        server: Toolgap's URL, a client, or :class:`Restores` that several hooks share.
        **options: Of :class:`Restores`.
    """

    def __init__(self, server: str | Toolgap | Restores = DEFAULT_URL, **options: Any) -> None:
        super().__init__()
        self.restores = as_restores(server, options)
        self._session_of: OrderedDict[str, str] = OrderedDict()

    def tool_ended(self, call_id: str, content: str) -> None:
        """An agent says that a tool call has ended, with what it will show the model."""
        with self.restores.harmless("reading a tool's result"):
            if (session := self._session_of.get(call_id)) is not None:
                message = {"role": "tool", "tool_call_id": call_id, "content": content}
                self.restores.ended(session, call_id, message)

    def session_ended(self, session: str) -> None:
        """An agent says that the conversation with this ``litellm_session_id`` has ended."""
        self.restores.closed(session)

    def log_pre_api_call(self, model: Any, messages: Any, kwargs: Any) -> None:
        """The calls have ended whose results a request brings."""
        with self.restores.harmless("reading a request"):
            for message in reversed(messages if isinstance(messages, list) else []):
                call_id = _answered_call(message)
                if call_id not in self._session_of:
                    break
                self.restores.ended(self._session_of[call_id], call_id)

    def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Submit, if the answer calls tools; a stream's answer comes once it is complete."""
        with self.restores.harmless("reading an answer"):
            self._answered(kwargs, response_obj)

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """As :meth:`log_success_event`."""
        self.log_success_event(kwargs, response_obj, start_time, end_time)

    def _answered(self, kwargs: Mapping[str, Any], response: Any) -> None:
        choices = getattr(response, "choices", None)
        message = getattr(choices[0], "message", None) if choices else None
        asked = kwargs.get("messages")
        if message is None or not isinstance(asked, list):
            return
        calls = [Call(call.id, call.function.name) for call in message.tool_calls or ()]
        session = self._session(kwargs, asked)
        for call in calls:
            self._session_of[call.id] = session
            if len(self._session_of) > MAX_CALLS:
                self._session_of.popitem(last=False)
        answer = Answer(
            request_id=response.id,
            request=_request(kwargs.get("optional_params") or {}, asked),
            messages=[_message(message)],
            calls=[call.id for call in calls],
        )
        self.restores.answered(session, answer, calls)

    def _session(self, kwargs: Mapping[str, Any], asked: list[Any]) -> str:
        """The conversation's name, if it was given one; else it is known by the tool calls in it."""
        named = (kwargs.get("litellm_params") or {}).get("litellm_session_id")
        if named:
            return str(named)
        for message in reversed(asked):
            call_id = _answered_call(message)
            if call_id in self._session_of:
                return self._session_of[call_id]
        return uuid.uuid4().hex


def _request(parameters: Mapping[str, Any], messages: list[Any]) -> PrefixFields:
    """A request's body as far as it shapes the prompt."""
    extra = parameters.get("extra_body")
    known = {**parameters, **(extra if isinstance(extra, Mapping) else {})}
    request = {name: known[name] for name in PROMPT_FIELDS if known.get(name) is not None}
    return cast("PrefixFields", {**request, "messages": [_message(message) for message in messages]})


def _answered_call(message: Any) -> str:
    """The call whose result a message is; empty if it is none."""
    return str(message.get("tool_call_id") or "") if isinstance(message, Mapping) else ""


def _message(message: Any) -> Message:
    dump = getattr(message, "model_dump", None)
    return cast("Message", dump(exclude_none=True) if dump is not None else dict(message))
