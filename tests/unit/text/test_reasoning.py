"""Thoughts and answer of a reasoning model's output, in pieces of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.text.reasoning import ReasoningSplitter, WrappedAnswerSplitter
from antiphon.shared.text.templates.template_formats import reasoning_format, tool_format


def split(*pieces: str, inside: bool = False) -> tuple[str | None, str]:
    splitter = ReasoningSplitter(inside=inside)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    reasoning = "".join(part.reasoning for part in parts)
    return reasoning if splitter.found else None, "".join(part.answer for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("plain", False, (None, "plain")),
        ("\n plain\n", False, (None, "\n plain\n")),
        ("a <think>b</think>", False, (None, "a <think>b</think>")),
        ("<think>\nb\n</think>\n\nc\n", False, ("b", "c\n")),
        (" <think>b\n\nc</think>", False, ("b\n\nc", "")),
        ("<think>b", False, ("b", "")),
        ("<think>b\n</thi", False, ("b\n</thi", "")),
        ("<thi", False, (None, "<thi")),
        ("b</think>c", True, ("b", "c")),
        ("<think>b</think>c", True, ("b", "c")),
        ("<think></think>c", False, ("", "c")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("", False, (None, "")),
        ("", True, ("", "")),
    ],
)
def test_the_parts_of_an_output(text: str, inside: bool, expected: tuple[str | None, str]) -> None:
    assert split(text, inside=inside) == expected
    assert split(*text, inside=inside) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", " ", "a", "</thin"]), max_size=8)


@given(PIECES, st.data(), st.booleans())
def test_the_parts_do_not_depend_on_how_the_output_is_cut(texts: list[str], data: st.DataObject, inside: bool) -> None:
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning, answer = split(*pieces, inside=inside)
    assert (reasoning, answer) == split(text, inside=inside)
    if reasoning is None:
        assert answer == text


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter()
    shown = [splitter.feed(piece) for piece in ["<thi", "nk>\na", " b", "\n", "</th", "ink>", "\n", "c"]]
    assert [part.reasoning for part in shown] == ["", "a", " b", "", "", "", "", ""]
    assert [part.answer for part in shown] == ["", "", "", "", "", "", "", "c"]


HERMES = "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>{...}</tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, "hermes"),
        ("no functions here, but <tool_call>", ""),
        ("{{ tools }}", ""),
        ("{{ tools }}<tool_call>{{ name }}<arg_key>", "glm45"),
        ("{{ tools }}<tool_call><function={{ name }}><parameter={{ key }}>", "qwen3_coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "deepseek_v3"),
        ('{{ tools }}{\\"name\\": function name, \\"parameters\\": dictionary of argument', "llama3_json"),
        ("{{ tools }}[func_name1(params_name1=params_value1, params_name2=", "pythonic"),
        ("{{ tools }}[func_name1(param1=value1), func_name2(...)]", "pythonic"),
        ("{{ tools }}[TOOL_CALLS] or <tool_call>", ""),
        ("<|im_start|>{{ 'List of tools: [' + tools }}", "lfm2"),
        ("List of tools: <|tool_list_start|>[{{ tools }}", "lfm2"),
        ("List of tools: <|tool_list_start|>[{{ tools }} <|tool_call_start|>", "lfm2"),
        ("{{ tools }}<seed:tool_call>\\n<function=a>\\n<parameter=b>", "seed_oss"),
        ('{{ tools }}<minimax:tool_call><invoke name=\\"a\\"><parameter name=\\"b\\">', "minimax_m2"),
        # as MiniMax M3's template begins, whose calls look like those of other models and are not
        ("{%- set ns_token = ']<]minimax[>[' -%}{%- set toolcall_begin_token = ns_token ~ '<tool_call>' -%}{{ tools }}"
         "{{- toolcall_begin_token ~ ns_token ~ '<invoke name=\\\"' ~ name ~ '\\\">' ~ ns_token ~ '</invoke>' -}}", ""),
        ("{%- set ns_token = ']<]minimax[>[' -%}{{ tools }}{{ ns_token ~ '<tool_call>' }}", ""),
        ('{{ tools }}<tool_call><invoke name=\\"a\\"><b>', ""),
    ],
)  # fmt: skip
def test_the_format_of_calls_is_recognised_from_the_template(template: str, expected: str) -> None:
    assert tool_format(template) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n<answer>\nb\n</answer>\n<tool_calls>", ("a", "b<tool_calls>")),
        ("<think>a</think>b</answer>", ("a", "b</answer>")),
        ("<answer>\nb\n\nc\n</answer>", (None, "b\n\nc")),
        ("<think>a</think><answer>b", ("a", "b")),
        ("<think>a</think><ans", ("a", "<ans")),
        ("b <answer>c</answer>", (None, "b <answer>c</answer>")),
    ],
)
def test_marks_around_the_answer_are_removed(text: str, expected: tuple[str | None, str]) -> None:
    for pieces in ([text], [*text]):
        splitter = WrappedAnswerSplitter(ReasoningSplitter())
        parts = [*map(splitter.feed, pieces), splitter.finish()]
        reasoning = "".join(part.reasoning for part in parts) if splitter.found else None
        assert (reasoning, "".join(part.answer for part in parts)) == expected


def test_the_format_of_reasoning_is_recognised_from_the_template() -> None:
    assert reasoning_format("{{ '<think>\\n' }}") == ""
    assert reasoning_format("{% set content = content.split('</think>')[-1] %}") == "qwen3"
    assert reasoning_format("[THINK]{{ thoughts }}[/THINK]") == "mistral"
    assert reasoning_format("{{ content.split('</think>')[-1].split('<answer>')[-1] }}") == "hunyuan"
    assert reasoning_format("<|extra_0|>{% if not enable_thinking %}<think>\\n\\n</think>\\n{% endif %}") == "hunyuan"
    assert reasoning_format("{{ '</seed:think>' }}") == "seed_oss"
