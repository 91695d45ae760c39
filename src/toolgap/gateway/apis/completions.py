"""Answers of ``/v1/completions``. No I/O."""

from toolgap.gateway.apis.answers import (
    Content,
    Json,
    Pieces,
    Reader,
    UnreadableError,
    Usage,
    dicts,
    optional,
    refuse_error,
    usage_of,
)
from toolgap.gateway.apis.written import LONGEST_MARK, begins, written_calls
from toolgap.hooks.restores import Call


class CompletionReader(Reader):
    """Reads a text completion. It has no messages, and its tool calls stand in its text.

    Args:
        max_bytes: What may be kept of it.
        request: Tells whether the text begins with the prompt, whose calls are none of the answer's.
    """

    def __init__(self, max_bytes: int, request: Json) -> None:
        super().__init__(max_bytes)
        self._is_read = not request.get("echo")
        self._id: str | None = None
        self._text = Pieces(self)
        self._tail = ""
        self._matched: str | None = None
        self._finish: str | None = None
        self._choices = 1
        self._usage = Usage()

    def event(self, event: Json) -> None:
        """One chunk."""
        refuse_error(event)
        if self._id is None and (name := optional(event.get("id"), str)):
            self.keep(len(name))
            self._id = name
        if event.get("usage") is not None:
            self._usage = usage_of(event["usage"], "prompt_tokens", "completion_tokens")
        for choice in dicts(event.get("choices")):
            index = optional(choice.get("index"), int) or 0
            self._choices = max(self._choices, index + 1)
            if index == 0:
                self._add(choice)

    def body(self, body: Json) -> None:
        """A whole completion."""
        self.event(body)
        self.over = True

    def content(self) -> Content:
        """Its id and its calls, if it has one choice."""
        certain = self._choices == 1 and self._finish == "stop" and self._is_read
        names = written_calls(self._whole_text()) if certain else ()
        return Content(
            id=self._id if self._choices == 1 else None,
            # Nobody gives these calls ids; what is told of one must not fit another conversation's.
            calls=tuple(Call(f"{self._id or 'call'}-{number}", name) for number, name in enumerate(names)),
            messages=(),
            finish=self._finish,
            reasoned=False,
            usage=self._usage,
        )

    def _add(self, choice: Json) -> None:
        if self._is_read and (text := optional(choice.get("text"), str)):
            self._text.add(text)
            if not self.calling:
                # A mark may come in pieces.
                self._tail += text
                self.calling = begins(self._tail)
                self._tail = self._tail[-LONGEST_MARK:]
        finish = optional(choice.get("finish_reason"), str)
        if finish == "abort":
            raise UnreadableError("the request was aborted")
        if finish is not None and self._finish is None:
            self.keep(len(finish))
            self._finish, self.whole = finish, True
        matched = choice.get("matched_stop")
        if isinstance(matched, str):
            self.keep(len(matched))
            self._matched = matched

    def _whole_text(self) -> str:
        """With the text that the client asked to stop at, which the server leaves out."""
        text, matched = str(self._text), self._matched or ""
        # SGLang leaves out no more than the part that it has not sent yet.
        sent = next((size for size in range(len(matched), 0, -1) if text.endswith(matched[:size])), 0)
        return text + matched[sent:]
