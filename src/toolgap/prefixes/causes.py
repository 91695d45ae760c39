"""Why a prompt stops being an extension of the one before it: each cause by name, with its mend."""

from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """Why two turns part."""

    NAMESPACE = "namespace_changed"
    TEMPLATE_OPTIONS = "template_options_changed"
    TOOLS = "tool_list_changed"
    SCHEMA_ORDER = "schema_reordered"
    BILLING_HEADER = "billing_header"
    NONCE = "nonce"
    SYSTEM_PROMPT = "system_prompt_changed"
    ARGUMENTS = "arguments_reserialised"
    RESULTS = "results_reordered"
    REASONING_NOT_SENT = "reasoning_not_sent"
    COMPACTED = "history_compacted"
    EDITED = "history_edited"
    TOKEN_MERGE = "token_merge"  # noqa: S105 - no password
    HARMONY = "harmony_drops_analysis"
    RETENTION = "retention_flag"
    THINKING_DROPPED = "thinking_dropped"
    GENERATION_PROMPT = "generation_prompt"
    TEMPLATE_TEXT = "template_text"
    UNKNOWN = "unknown"


class Meaning(NamedTuple):
    """What a cause stands for.

    Attributes:
        meaning: What happens, in a sentence.
        mend: What to do about it.
    """

    meaning: str
    mend: str


CAUSES: dict[Cause, Meaning] = {
    Cause.NAMESPACE: Meaning(
        "The turns name different models, adapters, salts or keys: KV of one is never used for another.",
        "Keep model, LoRA adapter, cache_salt and extra_key the same throughout a session.",
    ),
    Cause.TEMPLATE_OPTIONS: Meaning(
        "An option that the chat template reads differs between the turns.",
        "Send the same chat_template_kwargs, reasoning options and tool_choice in every turn of a session.",
    ),
    Cause.TOOLS: Meaning(
        "Tools were added, removed, reordered or redefined; templates write them before the conversation, so "
        "that all of it is lost.",
        "Fix the list when the session begins, in one order; let a tool refuse instead of taking it away.",
    ),
    Cause.SCHEMA_ORDER: Meaning(
        "A tool's definition has the same content in another order of keys.",
        "Serialise schemas once and keep the text, or sort their keys everywhere; avoid unordered maps.",
    ),
    Cause.BILLING_HEADER: Meaning(
        "Claude Code's attribution header, which differs from request to request, begins the system prompt.",
        "Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 for Claude Code, or have a gateway strip the header.",
    ),
    Cause.NONCE: Meaning(
        "A time, a random id or a counter stands in a part that should be the same in every turn.",
        "Take it out, keep its first value for the session, or move it to the end of the newest message.",
    ),
    Cause.SYSTEM_PROMPT: Meaning(
        "The system prompt was changed.",
        "Keep it as it is for the session; say what is new in a later message.",
    ),
    Cause.ARGUMENTS: Meaning(
        "A tool call's arguments came back with the same content in another order or spelling.",
        "Send the arguments back as the very text that the model wrote; do not parse and write them again.",
    ),
    Cause.RESULTS: Meaning(
        "Tool results came back in another order, or with their keys in another order.",
        "Serialise a result once, keep its text, and send results in the order of their calls.",
    ),
    Cause.REASONING_NOT_SENT: Meaning(
        "The client does not send the answer's reasoning back, which the template would show.",
        "Send the reasoning back as it came, in the field it came in: reasoning_content of the message, or its "
        "thinking blocks.",
    ),
    Cause.COMPACTED: Meaning(
        "Messages of the earlier turn are gone: the history was cut or summarised.",
        "Nothing to mend if it was meant; compact rarely, and restore the new prompt instead of the old one.",
    ),
    Cause.EDITED: Meaning(
        "A message of the history differs from what it was in the earlier turn.",
        "Only append to the history; never rewrite a message that was sent.",
    ),
    Cause.TOKEN_MERGE: Meaning(
        "Both turns have the same text here, as other tokens: what the model wrote is tokenized anew together "
        "with what stands beside it.",
        "Name the prefix by request_id or by the tokens themselves; count on the prompt, not on the answer.",
    ),
    Cause.HARMONY: Meaning(
        "Harmony's template drops the analysis channel from the history.",
        "By design of the format once an answer is final; within a tool loop too, since SGLang hands this "
        "template no analysis of earlier answers. Count on the prompt, not on the answer.",
    ),
    Cause.RETENTION: Meaning(
        "The template drops earlier reasoning unless a flag tells it not to.",
        "Set the flag that is named in chat_template_kwargs of every request, or in the server's "
        "--default-chat-template-kwargs.",
    ),
    Cause.THINKING_DROPPED: Meaning(
        "The template drops reasoning: most templates what is from before the newest user message, some all of it.",
        "By design of the template, and with most harmless within a tool loop; restore the prefix up to the last "
        "user message, or use a template that keeps reasoning.",
    ),
    Cause.GENERATION_PROMPT: Meaning(
        "What the template writes to open an answer is not what it writes there once the answer is history.",
        "Use a template whose history begins as its generation prompt does; until then the prefix ends "
        "before the generation prompt.",
    ),
    Cause.TEMPLATE_TEXT: Meaning(
        "The template writes the answer in other words than the model did, though the client sent it back "
        "unchanged.",
        "Change the template to write what the model writes; until then count on the prompt, not on the answer.",
    ),
    Cause.UNKNOWN: Meaning(
        "No cause that this tool knows fits.",
        "Compare the two texts; if the reason is a general one, please report it.",
    ),
}
