import re
from typing import Any

import pytest

from antiphon.shared.text.templates.chat_template import ChatTemplate, TemplateFailedError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi! <b>&amp;</b> \"quoted\" 'é' 好"},
    {"role": "assistant", "content": "Hello.", "name": "Ann"},
    {"role": "user", "content": "Bye"},
]
CONSTANTS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
FEATURES = """{%- set ns = namespace(count=0, last=none) -%}
{%- macro turn(m) -%}
[{{ m.role | upper }}: {{ m.content | trim }}{{ ' (' ~ m.name ~ ')' if m.name is defined }}]{%- endmacro -%}
    {% if tools %}
    tools
    {% endif %}
{% for m in messages %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{{ turn(m) }}{% endgeneration %}
  {% set ns.count = ns.count + 1 %}
  {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
{{ ns.count }} {{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ dict(a=1) }} {{ undefined_name }}
{{- messages | map(attribute='role') | join(',') }} {{ strftime_now('%%') }}"""


def render(source: str, messages: list[dict[str, str]] = MESSAGES, generate: bool = True, **options: Any) -> str:
    made = ChatTemplate(source, CONSTANTS, options.get("limit", 10_000))
    return made.render(messages, generate, options.get("variables"))


def test_a_conversation_becomes_the_models_prompt() -> None:
    text = render(CHATML, MESSAGES[:1])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, MESSAGES[:1], generate=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.model
@pytest.mark.parametrize("source", [CHATML, LLAMA_2, FEATURES])
@pytest.mark.parametrize("generate", [True, False])
def test_the_dialect_is_that_of_transformers(source: str, generate: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=generate, **CONSTANTS)
    assert render(source, generate=generate) == rendered[0]


def test_variables_of_a_request_reach_the_template_and_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ mood }}{{ messages | length }}{{ bos_token }}", CONSTANTS, 1000)
    variables = {"tools": [{"b": 1, "a": 2}], "mood": "good", "messages": []}
    assert template.render(MESSAGES, True, variables) == '[{"b": 1, "a": 2}]good4<s>'
    assert template.render(MESSAGES, True) == "null4<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ call.arguments | tojson }}",
        "{{ '' + call.arguments + '' }}",
        "{{ call.arguments }}",
        "{{ call.arguments ~ '' }}",
        "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
        '{"{% for key, value in call.arguments | items %}{{ key }}": {{ value | tojson }}{% endfor %}}',
        '{"{% for key in call.arguments %}{{ key }}": {{ call.arguments[key] | tojson }}{% endfor %}}',
    ],
)
def test_templates_may_take_arguments_as_an_object_or_as_text(source: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"é": ["Rome", 1.0, None]}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    template = ChatTemplate("{% set call = messages[0].tool_calls[0].function %}" + source, CONSTANTS, 1000)
    assert template.render([message], True) == '{"é": ["Rome", 1.0, null]}'


def test_a_template_may_take_for_granted_that_tools_have_descriptions() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    source = "{% for tool in tools %}{{ '// ' + tool.function.description + '\n' }}{{ tool | tojson }}{% endfor %}"
    assert render(source, variables={"tools": tools}) == '// \n{"type": "function", "function": {"name": "now"}}'
    with pytest.raises(TemplateFailedError, match="parameters"):
        render("{{ '' + tools[0].function.parameters }}", variables={"tools": tools})


@pytest.mark.parametrize("end", ["Hello.", "Hello. ", "<|im_end|>", "{"])
def test_the_final_message_can_be_left_open(end: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": end}]
    template = ChatTemplate(CHATML, CONSTANTS, 10_000)
    text = template.render(messages, False, continue_final_message=True)
    assert text == template.render(messages, False).removesuffix("<|im_end|>\n")
    stripping = ChatTemplate("{{ messages[-1].content.strip() }}</s>", CONSTANTS, 1000)
    assert stripping.render(messages, False, continue_final_message=True) == end
    with pytest.raises(TemplateFailedError, match="does not write the final message"):
        ChatTemplate("{{ messages[0].content }}", CONSTANTS, 1000).render(messages, False, continue_final_message=True)


def test_a_templates_refusal_is_passed_on_in_its_own_words() -> None:
    messages = [{"role": "assistant", "content": "I first"}]
    with pytest.raises(TemplateFailedError, match=r"refuses these messages: Conversation roles must alternate"):
        render(LLAMA_2, messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{% unknown %}", "not valid Jinja"),
        ("{{ messages.nothing.at_all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "failed|cannot be compiled"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ '\ud800' }}".encode("utf-16", "surrogatepass").decode("utf-16", "replace"), ""),
    ],
)
def test_a_template_that_fails_says_so(source: str, message: str) -> None:
    if not message:
        assert render(source)
        return
    with pytest.raises(TemplateFailedError, match=message):
        render(source)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(TemplateFailedError, match="Unicode"):
        render("{{ '\\ud800' }}")


@pytest.mark.matrix("S-05")
def test_output_is_bounded() -> None:
    assert render("{% for i in range(10) %}0123456789{% endfor %}", limit=100) == "0123456789" * 10
    with pytest.raises(TemplateFailedError, match="longer than 99 characters"):
        render("{% for i in range(10) %}0123456789{% endfor %}", limit=99)


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__init__=1) }}",
    "{{ messages.append({'role': 'x'}) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages.sort() }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ lipsum.__globals__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ (1).__class__.__base__ }}",
    "{{ range.__self__ }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ messages | map(attribute='__class__.__mro__') | list }}",
    "{{ request.application.__globals__ }}",
)


@pytest.mark.matrix("S-05")
@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python(source: str) -> None:
    before = [dict(message) for message in MESSAGES]
    try:
        text = render(source)
    except TemplateFailedError as error:
        text = str(error)
    assert not re.search(r"<class|<module|<function|<slot|uid=|root:|mappingproxy|builtins", text), text
    assert before == MESSAGES


IN_PARTS = {
    "smolvlm": (
        "{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    ),
    "llava": (
        "{% for message in messages %}{{ message.role | capitalize + ':' }}"
        "{% for content in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
        "{% for content in message.content | selectattr('type', 'equalto', 'text') %}{{ ' ' + content['text'] }}"
        "{% endfor %}{{ '<end_of_utterance>\n' }}{% endfor %}"
    ),
}
"""The structure of templates that are published with models for images."""


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_template_that_reads_parts_only_gets_texts_as_parts(name: str) -> None:
    template = ChatTemplate(IN_PARTS[name], CONSTANTS, 1000)
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat"},
    ]
    space = "" if name == "smolvlm" else " "
    ends = "<end_of_utterance>\n"
    whole = f"User: Hi{ends}Assistant: {ends}User:<image>{space}What?{ends}Assistant: A cat{ends}"
    assert template.render(talk, False) == whole
    assert template.render(talk, False, continue_final_message=True) == whole.removesuffix(ends)


def test_a_template_that_asks_what_it_was_given_gets_texts_as_they_are() -> None:
    asks = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(asks, [{"role": "user", "content": "Hi"}]) == "Hi"
    split = "{% for m in messages %}{% for word in m.content.split() %}{{ word }},{% endfor %}{% endfor %}"
    assert render(split, [{"role": "user", "content": "Hi there"}]) == "Hi,there,"
