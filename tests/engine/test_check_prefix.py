"""toolgap check-prefix on a real server, with the chat templates of published models: each cause, by name."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import ADMIN_KEY, DEADLINE_S, Server
from typer.testing import CliRunner, Result

from toolgap.cli import app
from toolgap.cpu.model import build_tiny_model
from toolgap.prefixes.causes import Cause
from toolgap.terminal import Exit

pytestmark = pytest.mark.engine

TEXT_KEY = "the-ordinary-key"
"""SGLang's own routes want it where the endpoint wants the admin key."""

TEMPLATES = Path(__file__).parent.parent / "templates"

SYSTEM = {"role": "system", "content": "You help with the weather."}
USER = {"role": "user", "content": "How is the weather in Bern?"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says how the weather will be.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_web",
        "description": "Finds pages.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
REASONING = "The user wants a forecast, so I call the tool."
ARGUMENTS = '{"city": "Bern", "days": 2}'
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear", "degrees": 21}'}
ANSWER = {"role": "assistant", "content": "It will be clear, at 21 degrees."}
MORE = {"role": "user", "content": "And in Basel?"}


def call(reasoning: str | None = None, arguments: str = ARGUMENTS) -> dict[str, Any]:
    message = json.loads(json.dumps(CALL))
    message["tool_calls"][0]["function"]["arguments"] = arguments
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def body(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Any = (WEATHER, SEARCH),
    **options: Any,
) -> dict[str, Any]:
    """A request whose prompt is rendered by a published model's template."""
    kwargs = options.pop("chat_template_kwargs", {})
    if template is not None:
        kwargs = {"chat_template": (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"), **kwargs}
    made: dict[str, Any] = {
        "model": "default",
        "messages": [dict(m) for m in messages],
        "tools": list(tools),
        **options,
    }
    return made | ({"chat_template_kwargs": kwargs} if kwargs else {})


def response(message: Mapping[str, Any], ids: Sequence[int] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "message": dict(message), "finish_reason": "stop"}
    return {"choices": [choice if ids is None else {**choice, "response_token_ids": list(ids)}]}


MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|end_of_role|>", "<|start_of_role|>"),
    *("<|end_of_text|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"),
)
"""Of the templates: single tokens in their models' tokenizers, so that nothing merges with them."""


def add_markers(folder: Path) -> None:
    """Make single tokens of them in a model's tokenizer, in place of its last ones."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for marker in MARKERS:
        token, number = vocabulary.popitem()
        assert "".join(merges.pop()) == token
        added = {**tokenizer["added_tokens"][0], "id": number, "content": marker, "special": False}
        tokenizer["added_tokens"].append(added)
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    add_markers(model)
    arguments = ["--trust-request-chat-template", "--chat-template", str(TEMPLATES / "qwen3.jinja")]
    arguments += ["--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3", "--api-key", TEXT_KEY]
    with Server(model, tmp_path_factory.mktemp("check-prefix"), arguments=arguments) as started:
        yield started


class Checker:
    """Runs the command on turns against a server."""

    def __init__(self, server: Server, text_key: str | None) -> None:
        self.url = server.url
        assert server.admin_key is not None
        self.keys = ["--api-key", server.admin_key, *(("--text-api-key", text_key) if text_key else ())]
        self.http = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {text_key}"}, timeout=DEADLINE_S
        )

    def ids(self, text: str) -> list[int]:
        """The tokens of a text that a model might have written."""
        reply = self.http.post("/v1/tokenize", json={"prompt": text, "add_special_tokens": False})
        tokens: list[int] = reply.json()["tokens"]
        return tokens

    def run(self, turns: Any, *options: str) -> Result:
        return CliRunner().invoke(
            app,
            ["check-prefix", "-", "--url", self.url, *self.keys, *options],
            input=turns if isinstance(turns, str) else json.dumps(turns),
        )

    def pairs(self, turns: Any, expected: Exit) -> list[dict[str, Any]]:
        result = self.run(turns, "--json")
        assert result.exit_code == expected, result.output
        pairs: list[dict[str, Any]] = json.loads(result.stdout)["pairs"]
        return pairs

    def extends(self, *turns: Any) -> dict[str, Any]:
        [pair] = self.pairs(turns, Exit.OK)
        assert pair["extends"]
        assert pair["common_tokens"] == pair["tokens"] <= pair["next_tokens"]
        assert pair["divergence"] is None
        return pair

    def parts(self, *turns: Any) -> dict[str, Any]:
        [pair] = self.pairs(turns, Exit.FAILED)
        assert not pair["extends"]
        return pair

    def cause(self, *turns: Any) -> tuple[str, str]:
        divergence = self.parts(*turns)["divergence"]
        return divergence["cause"], divergence["place"]


@pytest.fixture(scope="module")
def checker(server: Server) -> Iterator[Checker]:
    checker = Checker(server, TEXT_KEY)
    yield checker
    checker.http.close()


ASKED = [SYSTEM, USER]
CALLED = [*ASKED, CALL, RESULT]
ANSWERED = [*CALLED, ANSWER, MORE]


# ---- turns that extend ----


@pytest.mark.parametrize(
    "template", ["qwen2.5", "qwen3", "qwen3-coder", "glm-4.6", "granite-4.0", "deepseek-v3.1"]
)
def test_a_tool_loop_extends_where_no_reasoning_is_involved(checker: Checker, template: str) -> None:
    pair = checker.extends(body(template, ASKED), body(template, CALLED))
    assert pair["prompt"]["tokens"] + pair["answer"]["tokens"] == pair["tokens"]
    assert pair["answer_known_by"] == "next_turn"


@pytest.mark.parametrize("template", ["qwen3", "qwen3.5", "glm-4.6", "glm-4.7-flash"])
def test_a_tool_loop_extends_if_reasoning_is_sent_back(checker: Checker, template: str) -> None:
    turns = [
        {"request": body(template, ASKED), "response": response(call(REASONING))},
        {"request": body(template, [*ASKED, call(REASONING), RESULT])},
    ]
    pair = checker.extends(*turns)
    assert pair["answer_known_by"] == "message"
    assert pair["answer"]["common_tokens"] == pair["answer"]["tokens"] > 10


def test_an_answer_of_the_engine_itself_extends_or_is_told_why(checker: Checker) -> None:
    """What the model really wrote, random as it is: its prompt survives, and the counts are the engine's."""
    request = body(None, ASKED, tools=(), max_tokens=8, temperature=0, return_token_ids=True)
    reply = checker.http.post("/v1/chat/completions", json=request).json()
    message = reply["choices"][0]["message"]
    later = body(None, [*ASKED, {"role": "assistant", "content": message["content"] or ""}, MORE], tools=())
    [pair] = checker.pairs([{"request": request, "response": reply}, {"request": later}], Exit.FAILED)
    assert pair["answer_known_by"] == "tokens"
    assert pair["prompt"]["tokens"] == reply["usage"]["prompt_tokens"]
    assert pair["answer"]["tokens"] == reply["usage"]["completion_tokens"] - 1
    assert pair["prompt"]["common_tokens"] == pair["prompt"]["tokens"]


# ---- causes that lie in the template ----


@pytest.mark.parametrize("template", ["qwen3", "qwen3.5"])
def test_generation_prompt(checker: Checker, template: str) -> None:
    off = {"enable_thinking": False}
    cause, place = checker.cause(
        body(template, ASKED, chat_template_kwargs=off),
        body(template, [*ASKED, ANSWER, MORE], chat_template_kwargs=off),
    )
    assert (cause, place) == (Cause.GENERATION_PROMPT, "the generation prompt")


def test_thinking_dropped_when_a_user_message_arrives(checker: Checker) -> None:
    earlier = [*ASKED, call(REASONING), RESULT]
    cause, place = checker.cause(body("qwen3", earlier), body("qwen3", [*earlier, ANSWER, MORE]))
    assert (cause, place) == (Cause.THINKING_DROPPED, "messages[2].reasoning_content")


def test_thinking_of_the_answer_dropped_when_a_user_message_arrives(checker: Checker) -> None:
    answer = {**ANSWER, "reasoning_content": REASONING}
    pair = checker.parts(
        {"request": body("qwen3", ASKED), "response": response(answer)},
        {"request": body("qwen3", [*ASKED, answer, MORE])},
    )
    assert pair["divergence"]["cause"] == Cause.THINKING_DROPPED
    assert pair["prompt"]["common_tokens"] == pair["prompt"]["tokens"]


def test_thinking_that_the_later_request_itself_shows_to_be_dropped(checker: Checker) -> None:
    answer = {**ANSWER, "reasoning_content": REASONING}
    pair = checker.parts(body("qwen3", ASKED), body("qwen3", [*ASKED, answer, MORE]))
    assert pair["divergence"]["cause"] == Cause.THINKING_DROPPED
    assert (pair["answer"], pair["answer_known_by"]) == (None, "next_turn")


def test_retention_flag(checker: Checker) -> None:
    earlier = [*ASKED, call(REASONING), RESULT]
    divergence = checker.parts(
        body("glm-4.7-flash", earlier), body("glm-4.7-flash", [*earlier, ANSWER, MORE])
    )["divergence"]
    assert divergence["cause"] == Cause.RETENTION
    assert '"clear_thinking": false' in divergence["detail"]
    assert divergence["place"] == "messages[2].reasoning_content"


def test_template_text_differs_from_what_the_model_wrote(checker: Checker) -> None:
    written = (
        "\n<think></think><tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    )
    message = call(arguments='{"city": "Bern"}')
    divergence = checker.parts(
        {
            "request": body("glm-4.6", ASKED),
            "response": response(message, checker.ids(written + "</tool_call><|observation|>")),
        },
        {"request": body("glm-4.6", [*ASKED, message, RESULT])},
    )["divergence"]
    assert divergence["cause"] == Cause.TEMPLATE_TEXT
    assert divergence["text"].startswith("<tool_call>")
    assert divergence["next_text"].startswith("\n<tool_call>")


def test_harmony_drops_analysis(checker: Checker) -> None:
    written = (
        f"<|channel|>analysis<|message|>{REASONING}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It will be clear, at 21 degrees.<|return|>"
    )
    answer = {**ANSWER, "reasoning_content": REASONING}
    cause, _ = checker.cause(
        {"request": body("gpt-oss", ASKED), "response": response(answer, checker.ids(written))},
        {"request": body("gpt-oss", [*ASKED, answer, MORE])},
    )
    assert cause == Cause.HARMONY


def test_harmony_drops_analysis_is_seen_from_the_message_alone(checker: Checker) -> None:
    cause, _ = checker.cause(
        {"request": body("gpt-oss", ASKED), "response": response(call(REASONING))},
        {"request": body("gpt-oss", [*ASKED, call(REASONING), RESULT])},
    )
    assert cause == Cause.HARMONY


@pytest.mark.parametrize("template", ["qwen2.5", "granite-4.0", "deepseek-v3.1"])
def test_a_template_without_reasoning_drops_it_within_a_tool_loop_too(
    checker: Checker, template: str
) -> None:
    divergence = checker.parts(
        {"request": body(template, ASKED), "response": response(call(REASONING))},
        {"request": body(template, [*ASKED, call(REASONING), RESULT])},
    )["divergence"]
    assert divergence["cause"] == Cause.THINKING_DROPPED
    assert "even if it is sent back" in divergence["detail"]


def test_token_merge_at_a_seam(checker: Checker) -> None:
    """The model writes two newlines as two tokens; read back as text they are one."""
    newline = checker.ids("\n")
    assert checker.ids("\n\n") != newline * 2
    answer = {"role": "assistant", "content": "It will be clear.\n\n"}
    written = [*checker.ids("It will be clear."), *newline, *newline, *checker.ids("<|im_end|>")]
    divergence = checker.parts(
        {"request": body("qwen2.5", ASKED), "response": response(answer, written)},
        {"request": body("qwen2.5", [*ASKED, answer, MORE])},
    )["divergence"]
    assert divergence["cause"] == Cause.TOKEN_MERGE
    assert divergence["text"].startswith("\n")


def test_a_template_that_looks_ahead_is_unknown(checker: Checker) -> None:
    template = "{{ messages | length }} messages{% for m in messages %}{{ m.content }}{% endfor %}"
    kwargs = {"chat_template": template}
    pair = checker.parts(
        body(None, ASKED, tools=(), chat_template_kwargs=kwargs),
        body(None, [*ASKED, ANSWER, MORE], tools=(), chat_template_kwargs=kwargs),
    )
    assert pair["divergence"]["cause"] == Cause.UNKNOWN
    assert "do not differ" in pair["divergence"]["detail"]
    assert pair["common_tokens"] == 0


# ---- causes that lie in the client ----


def test_reasoning_not_sent_back(checker: Checker) -> None:
    written = (
        f"<think>\n{REASONING}\n</think>\n\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
    )
    sent = {"request": body("qwen3", ASKED), "response": response(call(REASONING), checker.ids(written))}
    cause, place = checker.cause(sent, {"request": body("qwen3", CALLED)})
    assert (cause, place) == (Cause.REASONING_NOT_SENT, "messages[2].reasoning_content")
    pair = checker.extends(sent, {"request": body("qwen3", [*ASKED, call(REASONING), RESULT])})
    assert pair["answer_known_by"] == "tokens"


def test_reasoning_not_sent_back_is_seen_from_the_message_alone(checker: Checker) -> None:
    cause, _ = checker.cause(
        {"request": body("qwen3", ASKED), "response": response(call(REASONING))},
        {"request": body("qwen3", CALLED)},
    )
    assert cause == Cause.REASONING_NOT_SENT


@pytest.mark.parametrize("template", ["glm-4.7-flash", "qwen3.5"])
def test_reasoning_not_sent_back_is_seen_without_a_response(checker: Checker, template: str) -> None:
    """The generation prompt opens reasoning, and history without any shows it closed."""
    cause, place = checker.cause(body(template, ASKED), body(template, CALLED))
    assert (cause, place) == (Cause.REASONING_NOT_SENT, "messages[2]")


def test_reasoning_sent_back_in_another_field(checker: Checker) -> None:
    """SGLang reads one field only, whatever other servers read."""
    cause, place = checker.cause(
        {"request": body("qwen3", ASKED), "response": response(call(REASONING))},
        {"request": body("qwen3", [*ASKED, {**CALL, "reasoning": REASONING}, RESULT])},
    )
    assert (cause, place) == (Cause.REASONING_NOT_SENT, "messages[2].reasoning")


@pytest.mark.parametrize("known", ["message", "history"])
def test_arguments_reserialised(checker: Checker, known: str) -> None:
    other = call(arguments='{"days": 2, "city": "Bern"}')
    if known == "message":
        turns: list[Any] = [
            {"request": body("qwen2.5", ASKED), "response": response(CALL)},
            {"request": body("qwen2.5", [*ASKED, other, RESULT])},
        ]
    else:
        turns = [body("qwen2.5", CALLED), body("qwen2.5", [*ASKED, other, RESULT, ANSWER, MORE])]
    cause, place = checker.cause(*turns)
    assert (cause, place) == (Cause.ARGUMENTS, "messages[2].tool_calls[0].function.arguments")


def test_arguments_with_other_blanks_are_no_difference(checker: Checker) -> None:
    """SGLang parses arguments and the template writes them: blanks do not matter, and are not blamed."""
    checker.extends(
        {"request": body("qwen2.5", ASKED), "response": response(CALL)},
        {"request": body("qwen2.5", [*ASKED, call(arguments='{"city":"Bern","days":2}'), RESULT])},
    )


def test_results_reordered(checker: Checker) -> None:
    other = {**RESULT, "content": '{"degrees": 21, "sky": "clear"}'}
    cause, place = checker.cause(
        body("qwen2.5", CALLED), body("qwen2.5", [*ASKED, CALL, other, ANSWER, MORE])
    )
    assert (cause, place) == (Cause.RESULTS, "messages[3].content")


def test_results_of_two_calls_swapped(checker: Checker) -> None:
    two = call()
    two["tool_calls"].append({**two["tool_calls"][0], "id": "call_2"})
    second = {"role": "tool", "tool_call_id": "call_2", "content": "rain"}
    cause, place = checker.cause(
        body("qwen2.5", [*ASKED, two, RESULT, second]),
        body("qwen2.5", [*ASKED, two, second, RESULT, ANSWER, MORE]),
    )
    assert (cause, place) == (Cause.RESULTS, "messages[3]")


def test_schema_reordered(checker: Checker) -> None:
    properties = {"days": {"type": "integer"}, "city": {"type": "string"}}
    function = WEATHER["function"]
    parameters = {**function["parameters"], "properties": properties}
    other = {**WEATHER, "function": {**function, "parameters": parameters}}
    cause, place = checker.cause(body("qwen2.5", ASKED), body("qwen2.5", CALLED, tools=[other, SEARCH]))
    assert (cause, place) == (Cause.SCHEMA_ORDER, "tools[0].function.parameters.properties")


@pytest.mark.parametrize(
    ("tools", "place", "detail"),
    [
        ([WEATHER], "tools[1]", "removed: 'search_web'"),
        ([SEARCH, WEATHER], "tools[0]", "another order"),
        (
            [WEATHER, SEARCH, {**SEARCH, "function": {**SEARCH["function"], "name": "read_page"}}],
            "tools[2]",
            "added",
        ),
    ],
)
def test_tool_list_changed(checker: Checker, tools: list[Any], place: str, detail: str) -> None:
    divergence = checker.parts(body("qwen3", ASKED), body("qwen3", CALLED, tools=tools))["divergence"]
    assert (divergence["cause"], divergence["place"]) == (Cause.TOOLS, place)
    assert detail in divergence["detail"]


def test_nonce_in_the_system_prompt(checker: Checker) -> None:
    def at(time: str) -> dict[str, str]:
        return {"role": "system", "content": f"You help. It is {time}. Be brief."}

    cause, place = checker.cause(
        body("qwen3", [at("2026-11-30T09:15:02Z"), USER]),
        body("qwen3", [at("2026-11-30T09:16:47Z"), USER, CALL, RESULT]),
    )
    assert (cause, place) == (Cause.NONCE, "messages[0].content")


def test_system_prompt_changed(checker: Checker) -> None:
    other = {**SYSTEM, "content": "You help with the weather and with trains."}
    cause, place = checker.cause(body("qwen3", ASKED), body("qwen3", [other, USER, CALL, RESULT]))
    assert (cause, place) == (Cause.SYSTEM_PROMPT, "messages[0].content")


def test_history_compacted(checker: Checker) -> None:
    summary = {"role": "user", "content": "So far: the weather in Bern will be clear."}
    pair = checker.parts(body("qwen2.5", ANSWERED), body("qwen2.5", [SYSTEM, summary]))
    assert pair["divergence"]["cause"] == Cause.COMPACTED
    assert pair["next_tokens"] < pair["tokens"]


def test_history_edited(checker: Checker) -> None:
    other = {**RESULT, "content": "[cleared]"}
    cause, place = checker.cause(
        body("qwen2.5", CALLED), body("qwen2.5", [*ASKED, CALL, other, ANSWER, MORE])
    )
    assert (cause, place) == (Cause.EDITED, "messages[3].content")


def test_namespace_changed(checker: Checker) -> None:
    pair = checker.parts(
        body("qwen2.5", ASKED, cache_salt="one"), body("qwen2.5", CALLED, cache_salt="another")
    )
    assert pair["divergence"]["cause"] == Cause.NAMESPACE
    assert pair["divergence"]["place"] == "cache_salt"
    assert pair["common_tokens"] == 0


def test_template_options_changed(checker: Checker) -> None:
    cause, place = checker.cause(
        body("glm-4.6", ASKED), body("glm-4.6", CALLED, chat_template_kwargs={"enable_thinking": False})
    )
    assert (cause, place) == (Cause.TEMPLATE_OPTIONS, "chat_template_kwargs.enable_thinking")


def test_an_innocent_difference_is_not_blamed(checker: Checker) -> None:
    """Two things differ: the one that does not matter for the prompt is not named."""
    earlier = [*ASKED, call(REASONING), RESULT]
    later = [*ASKED, call(REASONING, '{"city":"Bern","days":2}'), RESULT, ANSWER, MORE]
    cause, _ = checker.cause(body("qwen3", earlier), body("qwen3", later, tool_choice="auto"))
    assert cause == Cause.THINKING_DROPPED


# ---- the Anthropic form ----

CLAUDE_TOOL = {
    "name": "get_weather",
    "description": "Weather.",
    "input_schema": WEATHER["function"]["parameters"],
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern", "days": 2}}
USED = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "clear"}


def claude(messages: Sequence[Mapping[str, Any]], system: Any = "You help.") -> dict[str, Any]:
    return {
        "model": "default",
        "max_tokens": 64,
        "system": system,
        "tools": [CLAUDE_TOOL],
        "messages": list(messages),
    }


def test_anthropic_tool_loop_extends(checker: Checker) -> None:
    answer = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": REASONING, "signature": ""}, USE],
    }
    checker.extends(
        {"request": claude([USER]), "response": {"type": "message", **answer}},
        {"request": claude([USER, answer, {"role": "user", "content": [USED]}])},
    )


def test_anthropic_input_reordered(checker: Checker) -> None:
    other = {**USE, "input": {"days": 2, "city": "Bern"}}
    cause, place = checker.cause(
        {"request": claude([USER]), "response": {"type": "message", "role": "assistant", "content": [USE]}},
        {
            "request": claude(
                [USER, {"role": "assistant", "content": [other]}, {"role": "user", "content": [USED]}]
            )
        },
    )
    assert (cause, place) == (Cause.ARGUMENTS, "messages[1].content[0].input")


def test_billing_header(checker: Checker) -> None:
    def system(cch: str) -> list[dict[str, str]]:
        header = f"x-anthropic-billing-header: cc_version=2.1.36.abc; cc_entrypoint=cli; cch={cch};"
        return [{"type": "text", "text": header}, {"type": "text", "text": "You are a coding agent."}]

    later: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [USED]},
    ]
    result = checker.run([claude([USER], system("1a2b3")), claude(later, system("9f8e7"))], "--json")
    [pair] = json.loads(result.stdout)["pairs"]
    if pair["extends"]:
        pytest.fail("this SGLang strips the header itself: say so in docs/prefixes.md")
    assert pair["divergence"]["cause"] == Cause.BILLING_HEADER
    assert pair["divergence"]["place"] == "system[0].text"
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in pair["divergence"]["mend"]


# ---- sessions, thresholds, output, errors ----


def test_sessions_of_a_recording_are_kept_apart(checker: Checker) -> None:
    lines = [
        {"session": "a", "request": body("qwen2.5", ASKED), "started_ts": 1.0},
        {"session": "b", "request": body("qwen2.5", [USER])},
        {"session": "a", "request": body("qwen2.5", CALLED)},
        {"session": "b", "request": body("qwen2.5", [USER, ANSWER, MORE])},
    ]
    recording = "\n".join(map(json.dumps, lines))
    pairs = checker.pairs(recording, Exit.OK)
    assert [(pair["session"], pair["turn"]) for pair in pairs] == [("a", 1), ("b", 1)]
    result = checker.run(recording, "--session", "b", "--json")
    assert [pair["session"] for pair in json.loads(result.stdout)["pairs"]] == ["b"]


def test_a_share_may_be_enough(checker: Checker) -> None:
    off = {"enable_thinking": False}
    turns = [
        body("qwen3", ASKED, chat_template_kwargs=off),
        body("qwen3", [*ASKED, ANSWER, MORE], chat_template_kwargs=off),
    ]
    [pair] = checker.pairs(turns, Exit.FAILED)
    assert 0.9 < pair["share"] < 1.0
    assert pair["common_page_tokens"] % pair["page_tokens"] == 0
    assert checker.run(turns, "--min-share", "0.9").exit_code == Exit.OK
    assert checker.run(turns, "--min-share", "0.999").exit_code == Exit.FAILED


def test_what_a_person_reads(checker: Checker) -> None:
    other = call(arguments='{"days": 2, "city": "Bern"}')
    result = checker.run([body("qwen2.5", CALLED), body("qwen2.5", [*ASKED, other, RESULT, ANSWER, MORE])])
    assert result.exit_code == Exit.FAILED
    for words in ("turn 2 does not extend turn 1", "(stable)", "arguments_reserialised", "mend", '"city"'):
        assert words in result.stdout
    assert "messages[2].tool_calls[0].function.arguments" in result.stdout


def test_a_turn_that_the_server_refuses_is_named(checker: Checker) -> None:
    broken = body(None, [{"role": "user", "content": 5}])
    result = checker.run([body(None, ASKED), broken])
    assert result.exit_code == Exit.REFUSED
    assert "turn 2" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("keys", "words"),
    [(["--api-key", "wrong"], "wants the server's API key"), (["--api-key", ADMIN_KEY], "--text-api-key")],
)
def test_a_wrong_key_is_a_refusal(checker: Checker, keys: list[str], words: str) -> None:
    other = {**SYSTEM, "content": "You help with trains."}
    result = CliRunner().invoke(
        app,
        ["check-prefix", "-", "--url", checker.url, *keys],
        input=json.dumps([body(None, ASKED), body(None, [other, USER, ANSWER, MORE])]),
    )
    assert result.exit_code == Exit.REFUSED, result.output
    assert words in result.stderr


def test_one_key_is_enough_where_the_server_has_one(shared_server: Server) -> None:
    """The tiny model's own template, which writes roles and contents only."""
    checker = Checker(shared_server, None)
    checker.extends(body(None, ASKED, tools=()), body(None, [*ASKED, ANSWER, MORE], tools=()))
    other = {**SYSTEM, "content": "You help with trains."}
    turns = body(None, ASKED, tools=()), body(None, [other, USER, ANSWER, MORE], tools=())
    assert checker.cause(*turns) == (Cause.SYSTEM_PROMPT, "messages[0].content")
    checker.http.close()


# ---- every template with every fault ----


def with_change(number: int, **fields: Any) -> list[dict[str, Any]]:
    messages = json.loads(json.dumps(LOOP))
    messages[number].update(fields)
    return list(messages)


LOOP: list[dict[str, Any]] = [*ASKED, call(REASONING), RESULT, call(REASONING), RESULT]
REORDERED = call(REASONING, '{"days": 2, "city": "Bern"}')
FAULTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], set[Cause]]] = {
    "none": (LOOP, {}, set()),
    "another user message": (
        [*LOOP[:4], ANSWER, MORE],
        {},
        {Cause.THINKING_DROPPED, Cause.RETENTION, Cause.GENERATION_PROMPT},
    ),
    "arguments": (with_change(2, **REORDERED), {}, {Cause.ARGUMENTS}),
    "old reasoning": (with_change(2, reasoning_content=None), {}, {Cause.REASONING_NOT_SENT}),
    "new reasoning": (with_change(4, reasoning_content=None), {}, {Cause.REASONING_NOT_SENT}),
    "result": (with_change(3, content='{"degrees": 21, "sky": "clear"}'), {}, {Cause.RESULTS}),
    "system": (with_change(0, content="You help."), {}, {Cause.SYSTEM_PROMPT}),
    "question": (with_change(1, content="How is it in Bonn?"), {}, {Cause.EDITED}),
    "tools": (LOOP, {"tools": [SEARCH, WEATHER]}, {Cause.TOOLS}),
    "options": (LOOP, {"chat_template_kwargs": {"enable_thinking": False}}, {Cause.TEMPLATE_OPTIONS}),
}


@pytest.mark.parametrize("template", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_no_fault_is_called_by_another_ones_name(checker: Checker, template: str) -> None:
    """A template may not show a fault, so that the turns still extend; else the cause is the fault."""
    reasons = "reasoning_content" in (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    called: dict[str, str | None] = {}
    for fault, (messages, options, _) in FAULTS.items():
        turns = [body(template, LOOP[:4]), body(template, messages, **options)]
        if not reasons:
            for message in [*turns[0]["messages"], *turns[1]["messages"]]:
                message.pop("reasoning_content", None)
        result = checker.run(turns, "--json")
        [pair] = json.loads(result.stdout)["pairs"]
        called[fault] = pair["divergence"] and pair["divergence"]["cause"]
    wrong = {
        fault: cause for fault, cause in called.items() if cause is not None and cause not in FAULTS[fault][2]
    }
    assert wrong == {}
    assert called["system"] == Cause.SYSTEM_PROMPT
    assert called["question"] == Cause.EDITED


def test_the_first_of_two_faults_is_named(checker: Checker) -> None:
    messages = with_change(2, **REORDERED)
    messages[0] = {**SYSTEM, "content": "You help."}
    cause, place = checker.cause(body("qwen3", LOOP[:4]), body("qwen3", messages))
    assert (cause, place) == (Cause.SYSTEM_PROMPT, "messages[0].content")
