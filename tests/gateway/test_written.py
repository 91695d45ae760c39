# ruff: noqa: RUF001 - the marks are as models write them
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.gateway.apis.written import FORMATS, LONGEST_MARK, MAX_CALLS, UNNAMED, begins, written_calls

JSON = '{"name": "bash", "arguments": {"command": "ls </b>"}}'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

TEXTS = [
    (f"I look.\n<tool_call>\n{JSON}\n</tool_call>", ("bash",)),
    (f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>\n", ("bash", "bash")),
    ("<tool_call>\n<function=read>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ("read",)),
    ("<tool_call>read\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", ("read",)),
    ('<tool_call>{"name": "bash", "arg</tool_call>', (UNNAMED,)),
    (f"[TOOL_CALLS] [{JSON}, {JSON}]", ("bash", "bash")),
    ('[TOOL_CALLS]bash[ARGS]{"a": 1}[TOOL_CALLS]read[ARGS]{}', ("bash", "read")),
    (
        '<|python_tag|>{"name": "bash", "parameters": {}}; {"name": "read", "parameters": {}}',
        ("bash", "read"),
    ),
    (f"{BEGIN}{CALL}function{SEP}bash\n```json\n{{}}\n```{CALLED}\n{END}", ("bash",)),
    (f"{BEGIN}{CALL}bash{SEP}{{}}{CALLED}{CALL}read{SEP}{{}}{CALLED}{END}", ("bash", "read")),
    (
        f"{KIMI}<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI_END}",
        ("bash",),
    ),
    ('<minimax:tool_call>\n<invoke name="bash">\n</invoke>\n</minimax:tool_call>', ("bash",)),
    ('<|tool_call_start|>[bash(command="ls")]<|tool_call_end|>', ("bash",)),
    ('<|START_ACTION|>[{"tool_name": "bash", "parameters": {}}]<|END_ACTION|>', ("bash",)),
]
NONE = [
    "",
    "I would write <tool_call>.",
    f"<tool_call>{JSON}</tool_call> is how it is written.",
    f"<tool_call>{JSON}",
    f"{JSON}</tool_call>",
    f"[TOOL_CALLS] [{JSON}] and so on",
    "<|python_tag|>print(1)",
    "[TOOL_CALLS]",
    '[TOOL_CALLS] ["bash"]',
    "<unknown_call>x</unknown_call>",
]


@pytest.mark.parametrize(("text", "names"), TEXTS)
def test_the_calls_that_a_text_ends_with(text: str, names: tuple[str, ...]) -> None:
    assert begins(text)
    assert written_calls(text) == names


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_call_or_is_followed_by_text(text: str) -> None:
    assert written_calls(text) == ()


def test_very_many_calls_are_cut_off() -> None:
    assert len(written_calls(f"<tool_call>{JSON}</tool_call>" * 1000)) == MAX_CALLS
    assert len(written_calls(f"[TOOL_CALLS] [{', '.join([JSON] * 1000)}]")) == MAX_CALLS


MARKS = [mark for form in FORMATS for mark in form if mark is not None]


@given(
    st.lists(
        st.sampled_from([*MARKS, JSON, "[", "]", "{", "bash", "\n", CALL, SEP, "[ARGS]"])
        | st.text(max_size=3)
    )
)
def test_whatever_is_written_nothing_is_raised(parts: list[str]) -> None:
    text = "".join(parts)
    calls = written_calls(text)
    assert not calls or begins(text)
    assert len(calls) <= MAX_CALLS
    assert all(calls)


def test_no_mark_is_longer_than_the_longest() -> None:
    assert all(len(mark) <= LONGEST_MARK for mark in MARKS)
