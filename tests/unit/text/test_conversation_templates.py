"""The named conversation templates: their layouts to the letter, their end tokens, and which template a model gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.shared.config import ModelSettings
from antiphon.shared.models.model_files import UNPUBLISHED_TEMPLATE, described
from antiphon.shared.settings.allowed_values import CONV_TEMPLATES
from antiphon.shared.text.templates.chat_template import ChatTemplate, TemplateFailedError
from antiphon.shared.text.templates.conversation_templates import DIRECTORY, choose_template, guess, template_text
from tests.tokenizer_files import byte_level, write_tokenizer_files

SYSTEM, *TURNS = (
    {"role": role, "content": content}
    for role, content in (("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2"))
)
QWEN_TURNS = "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n"
QWEN_ANSWER = "<|im_start|>assistant\n"
LLAMA_3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA_3_TURNS = "".join(
    LLAMA_3.format(role) + text + "<|eot_id|>" for role, text in (("user", "U1"), ("assistant", "A1"), ("user", "U2"))
)
ROUNDS = "[Round 1]\n\n问：U1\n\n答：A1\n\n[Round 2]\n\n问：U2\n\n"
GOLDEN: dict[str, tuple[str, str, str]] = {
    # the beginning with the system message, the beginning without, and what follows both
    "generate": ("S", "", "U1A1U2"),
    "qwen-7b-chat": (
        "<|im_start|>system\nS<|im_end|>\n",
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
        QWEN_TURNS + QWEN_ANSWER,
    ),
    "baichuan2-chat": ("S", "", "<reserved_106>U1<reserved_107>A1<reserved_106>U2<reserved_107>"),
    "baichuan-chat": ("S", "", "<reserved_102>U1<reserved_103>A1<reserved_102>U2<reserved_103>"),
    "chatglm3": (
        "[gMASK]sop<|system|>\n S",
        "[gMASK]sop",
        "<|user|>\n U1<|assistant|>\n A1<|user|>\n U2<|assistant|>",
    ),
    "chatglm2": ("[gMASK]sopS\n\n", "[gMASK]sop", ROUNDS + "答："),
    "llama-2": (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n",
        "<s>[INST] ",
        "U1 [/INST] A1 </s><s>[INST] U2 [/INST]",
    ),
    "llama-3": (
        "<|begin_of_text|>" + LLAMA_3.format("system") + "S<|eot_id|>",
        "<|begin_of_text|>",
        LLAMA_3_TURNS + LLAMA_3.format("assistant"),
    ),
}


def rendered(name: str, messages: list[dict[str, str]], generate: bool = True, **constants: str) -> str:
    return ChatTemplate(template_text(name), constants, 10**6).render(messages, generate)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("generate", marks=pytest.mark.spec("S-DEP-015a")),
        pytest.param("llama-3", marks=pytest.mark.spec("S-DEP-015c")),
        pytest.param("llama-2", marks=pytest.mark.spec("S-DEP-015d")),
        pytest.param("qwen-7b-chat", marks=pytest.mark.spec("S-DEP-015e")),
        pytest.param("baichuan2-chat", marks=pytest.mark.spec("S-DEP-015f")),
        pytest.param("baichuan-chat", marks=pytest.mark.spec("S-DEP-015g")),
        pytest.param("chatglm3", marks=pytest.mark.spec("S-DEP-015h")),
        pytest.param("chatglm2", marks=pytest.mark.spec("S-DEP-015i")),
    ],
)
def test_a_conversation_is_laid_out_to_the_letter(name: str) -> None:
    with_system, without, turns = GOLDEN[name]
    assert rendered(name, [SYSTEM, *TURNS]) == with_system + turns
    assert rendered(name, TURNS) == without + turns


def test_the_page_of_the_documentation_has_every_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "conversation-templates.md").read_text(encoding="utf-8")
    assert [name for name in CONV_TEMPLATES if f"| `{name}` |" not in page] == []


def test_every_name_has_a_layout_but_the_one_that_is_not_public() -> None:
    assert (
        {path.stem for path in DIRECTORY.glob("*.jinja")} == set(GOLDEN) == set(CONV_TEMPLATES) - {UNPUBLISHED_TEMPLATE}
    )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("qwen-7b-chat", QWEN_ANSWER),
        ("llama-3", LLAMA_3.format("assistant")),
        ("baichuan2-chat", "<reserved_107>"),
        ("baichuan-chat", "<reserved_103>"),
        ("chatglm3", "<|assistant|>"),
        ("chatglm2", "答："),
    ],
)
def test_the_beginning_of_the_answer_is_written_only_where_it_is_wanted(name: str, answer: str) -> None:
    assert rendered(name, TURNS, generate=False) + answer == rendered(name, TURNS)


def test_begin_and_end_tokens_are_the_tokenizers_own_where_it_names_them() -> None:
    named: dict[str, Any] = {"bos_token": "<b>", "eos_token": "<e>"}
    assert rendered("llama-2", TURNS, **named) == "<b>[INST] U1 [/INST] A1 <e><b>[INST] U2 [/INST]"
    assert rendered("llama-3", TURNS[:1], generate=False, **named).startswith("<b><|start_header_id|>user")


def test_spaces_around_a_message_are_dropped_in_llama_3_alone() -> None:
    spaced = [{"role": "user", "content": " U "}]
    assert "\n\nU<|eot_id|>" in rendered("llama-3", spaced)
    for name in set(GOLDEN) - {"llama-3"}:
        assert " U " in rendered(name, spaced)


@pytest.mark.parametrize(
    ("name", "roles", "told"),
    [
        ("llama-2", "ua a", "messages of 'user' and 'assistant' alternate"),
        ("llama-2", "a", "the first is the user's"),
        ("llama-2", "s", "the system message inside the first user message"),
        *((name, "us", "no place for the role 'system'") for name in ("baichuan-chat", "baichuan2-chat", "chatglm2")),
        *(
            (name, "ut", "no place for the role 'tool'")
            for name in ("baichuan-chat", "baichuan2-chat", "chatglm2", "chatglm3")
        ),
    ],
)
def test_messages_that_a_layout_has_no_place_for_are_refused(name: str, roles: str, told: str) -> None:
    words = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": words[letter], "content": "x"} for letter in roles.replace(" ", "")]
    with pytest.raises(TemplateFailedError, match=f"The chat template refuses these messages: .*{told}"):
        rendered(name, messages)


# --- which template a model gets --------------------------------------------------------------------------------------


class Vocabulary:
    """As much of a codec as the choice of a template asks. `tokens` maps ids to texts."""

    def __init__(self, tokens: dict[int, str]) -> None:
        self._tokens = tokens

    def has_token(self, token_id: int, text: str) -> bool:
        return self._tokens.get(token_id) in (text, "")


def chosen(directory: Path, tokens: dict[int, str] | None = None, **settings: Any) -> Any:
    found = described(ModelSettings(model=str(directory), **settings))
    return choose_template(found, directory, Vocabulary(tokens or {}))  # pyright: ignore[reportArgumentType]


@pytest.mark.spec("S-DEP-016", "S-SRV-038")
@pytest.mark.parametrize("missing", range(6))
def test_of_all_that_name_a_template_the_first_in_the_order_counts(tmp_path: Path, missing: int) -> None:
    """Each case leaves out the first `missing` levels of the order."""
    levels = ["--chat-template", "CONV_TEMPLATE", "file", "tokenizer", "model id", "none"]
    there = set(levels[missing:])
    settings = {"--chat-template": {"chat_template": "{{ 1 }}"}, "CONV_TEMPLATE": {"conv_template": "generate"}}
    given: dict[str, Any] = {name: value for level in there for name, value in settings.get(level, {}).items()}
    if "model id" in there:
        given["model_id"] = "Qwen-7B-Chat"
    if "file" in there:
        (tmp_path / "ti_model_config.json").write_text(json.dumps({"conv_template_name": "chatglm3"}))
    write_tokenizer_files(tmp_path, byte_level(), **({"chat_template": "own"} if "tokenizer" in there else {}))
    expected = [
        ("", "{{ 1 }}"),
        ("generate", template_text("generate")),
        ("chatglm3", template_text("chatglm3")),
        ("", "own"),
        ("qwen-7b-chat", template_text("qwen-7b-chat")),
        ("", None),
    ]
    facts = chosen(tmp_path, **given)
    assert (facts.conv_template, facts.chat_template) == expected[missing]
    assert facts.named_tokens["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("Baichuan2-13B-Chat", "baichuan2-chat"),
        ("baichuan-13b-chat", "baichuan-chat"),
        ("baichuan-inc/Baichuan2_7B_Chat", "baichuan2-chat"),
        ("THUDM/chatglm3-6b", "chatglm3"),
        ("chatglm2-6b-int4", "chatglm2"),
        ("Meta-Llama-3-70B-Instruct", "llama-3"),
        ("llama3.1-8b-instruct", "llama-3"),
        ("llama-2-7b-chat-hf", "llama-2"),
        ("Llama2-13b-chat", "llama-2"),
        ("Qwen-14B-Chat", "qwen-7b-chat"),
        ("Qwen2.5-7B-Instruct", "qwen-7b-chat"),
        ("chatglm3-6b-base", ""),
        ("Llama-2-7b-hf", ""),
        ("Meta-Llama-3-8B", ""),
        ("llama-30b-chat", ""),
        ("Qwen-7B", ""),
        ("Baichuan2-7B-Base", ""),
        ("chatglm-6b", ""),
        ("my-model", ""),
        ("", ""),
    ],
)
def test_a_models_name_suggests_the_template_of_its_series(name: str, template: str) -> None:
    assert guess(ModelSettings(model_id=name)) == template
    assert guess(ModelSettings(served_model_name=name)) == template
    assert guess(ModelSettings(model=f"/data/{name}")) == template


def test_the_model_id_suggests_before_the_served_name_and_the_path() -> None:
    settings: dict[str, Any] = {"model_id": "chatglm3-6b", "served_model_name": "llama-2-chat", "model": "/qwen-chat"}
    assert guess(ModelSettings(**settings)) == "chatglm3"
    assert guess(ModelSettings(**{**settings, "model_id": ""})) == "llama-2"
    assert guess(ModelSettings(**{**settings, "model_id": "", "served_model_name": "model"})) == "qwen-7b-chat"


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        pytest.param(
            "llama-3", {128001: "<|end_of_text|>", 128009: "<|eot_id|>"}, marks=pytest.mark.spec("S-DEP-015c")
        ),
        pytest.param(
            "qwen-7b-chat",
            {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"},
            marks=pytest.mark.spec("S-DEP-015e"),
        ),
        pytest.param(
            "chatglm3", {2: "</s>", 64795: "<|user|>", 64797: "<|observation|>"}, marks=pytest.mark.spec("S-DEP-015h")
        ),
        *(pytest.param(name, {}) for name in ("generate", "llama-2", "baichuan2-chat", "baichuan-chat", "chatglm2")),
    ],
)
def test_the_end_tokens_of_a_template_are_those_that_the_vocabulary_has(
    tmp_path: Path, name: str, tokens: dict[int, str]
) -> None:
    write_tokenizer_files(tmp_path, byte_level(), chat_template="own")
    everything = dict.fromkeys(range(160_000), "a") | tokens
    assert chosen(tmp_path, everything, conv_template=name).end_token_ids == tuple(tokens)
    assert chosen(tmp_path, dict.fromkeys(tokens, ""), conv_template=name).end_token_ids == tuple(tokens)
    for token_id in tokens:
        others = {other: text for other, text in everything.items() if other != token_id}
        expected = tuple(other for other in tokens if other != token_id)
        assert chosen(tmp_path, others, conv_template=name).end_token_ids == expected
        assert chosen(tmp_path, others | {token_id: "b"}, conv_template=name).end_token_ids == expected
    assert chosen(tmp_path, everything, conv_template=name, chat_template="{{ 1 }}").end_token_ids == ()
    assert chosen(tmp_path, everything).end_token_ids == ()
