"""Conversation templates by name, with real processes: what `antiphon run` makes of variables and of a model directory,
and the clients of such a container."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon import LLM, SamplingParams
from antiphon.shared.settings.allowed_values import CONV_TEMPLATES
from tests.system.offline import FLAGS
from tests.system.served import READY_S, ROOT, Served, fetch, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
RUN = ("antiphon", "run")
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
]
BAICHUAN2 = "S<reserved_106>U1<reserved_107>A1<reserved_106>U2<reserved_107>"
CHATGLM3 = "[gMASK]sop<|system|>\n S<|user|>\n U1<|assistant|>\n A1<|user|>\n U2<|assistant|>"
ROUNDS = "[Round 1]\n\n问：U1\n\n答：A1\n\n[Round 2]\n\n问：U2\n\n答："
QWEN = "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n"
QWEN += "<|im_start|>assistant\n"
LLAMA_3 = (
    "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU1<|eot_id|>"
)
LLAMA_3 += "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU2"
LLAMA_3 += "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LAYOUTS = {
    "llama-3": f"<|begin_of_text|>{LLAMA_3}",
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A1 </s><s>[INST] U2 [/INST]",
    "qwen-7b-chat": f"<|im_start|>system\nS<|im_end|>\n{QWEN}",
    "baichuan-chat": "S<reserved_102>U1<reserved_103>A1<reserved_102>U2<reserved_103>",
    "chatglm3": CHATGLM3,
    "chatglm2": f"[gMASK]sopS\n\n{ROUNDS}",
}
"""The prompt of MESSAGES. Other servers here have `generate` and `baichuan2-chat`."""
SPECIAL_TOKENS = {
    "llama-3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama-2": ("<s>", "</s>"),
    "qwen-7b-chat": ("<|im_start|>", "<|im_end|>"),
    "baichuan-chat": ("<reserved_102>", "<reserved_103>"),
    "chatglm3": ("[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>"),
    "chatglm2": ("[gMASK]", "sop"),
}
"""The tokens that a layout is written with. The models of the series have them."""
HELLO = [{"role": "user", "content": "Hello"}]
END = 2
"""A token that ends answers in chatglm3, and that no file of the second model names as its end."""
DRAWN: dict[str, Any] = {"temperature": 2.0, "seed": 5, "n": 16, "max_tokens": 60, "return_token_ids": True}


def changed(path: Path, **values: object) -> None:
    """Sets values of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has no chat template, with a file that names one."""
    directory = Path(shutil.copytree(model, tmp_path_factory.mktemp("base") / "m"))
    changed(directory / "tokenizer_config.json", chat_template=None)
    said = {"model_id": "Baichuan2-13B-Chat", "conv_template_name": "baichuan2-chat"}
    (directory / "ti_model_config.json").write_text(json.dumps(said))
    return directory


@pytest.fixture(scope="module")
def glm(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, with a token `</s>` that only the template knows as an end."""
    directory = Path(shutil.copytree(base, tmp_path_factory.mktemp("glm") / "m"))
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "</s>"))
    changed(directory / "tokenizer_config.json", eos_token="<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        changed(directory / name, eos_token_id=0)
    changed(directory / "ti_model_config.json", model_id="chatglm3-6b", conv_template_name="chatglm3")
    return directory


def prompt_text(served: Served, **fields: Any) -> str:
    """The text of the prompt of MESSAGES, or of other `messages`."""
    tokens = fetch(served, "POST", "/tokenize", {"messages": MESSAGES, **fields}).json["tokens"]
    fields.pop("messages", None)
    return fetch(served, "POST", "/detokenize", {"tokens": tokens, **fields}).json["prompt"]


def chat(served: Served, **fields: Any) -> Any:
    return fetch(served, "POST", "/v1/chat/completions", {"messages": HELLO, **fields})


def model_of_series(model: Path, directory: Path, template: str) -> Path:
    """The weights and the tokenizer of `model`, with the special tokens of a template, which the directory names."""
    shutil.copytree(model, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    fillers = (token for token in tokenizer["added_tokens"] if not token["special"])
    for text in SPECIAL_TOKENS[template]:
        if text not in known:
            next(fillers).update(content=text, special=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    first, *_, last = SPECIAL_TOKENS[template]
    changed(directory / "tokenizer_config.json", chat_template=None, bos_token=first, eos_token=last)
    (directory / "ti_model_config.json").write_text(json.dumps({"conv_template_name": template}))
    return directory


@pytest.fixture(scope="module")
def series(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server with a model for each template, called like it."""
    folder = tmp_path_factory.mktemp("series")
    first, *others = [(name, model_of_series(model, folder / name, name)) for name in LAYOUTS]
    also = [f"--also={directory}={name}" for name, directory in others]
    with until_the_end(Served(f"--model={first[1]}", f"--served-model-name={first[0]}", *also)) as started:
        wait_until(lambda: len(fetch(started, "GET", "/v1/models").json["data"]) == len(LAYOUTS), READY_S)
        yield started


@pytest.mark.parametrize(
    "template",
    [
        "llama-3",
        pytest.param("llama-2", marks=pytest.mark.spec("S-DEP-015d")),
        "qwen-7b-chat",
        pytest.param("baichuan-chat", marks=pytest.mark.spec("S-DEP-015g")),
        "chatglm3",
        pytest.param("chatglm2", marks=pytest.mark.spec("S-DEP-015i")),
    ],
)
def test_a_server_writes_a_conversation_to_the_letter_and_in_the_series_tokens(template: str, series: Served) -> None:
    assert prompt_text(series, model=template) == LAYOUTS[template]
    asked = {"model": template, "messages": MESSAGES, "return_token_strs": True}
    written = fetch(series, "POST", "/tokenize", asked).json["token_strs"]
    assert all(written.count(token) == LAYOUTS[template].count(token) for token in SPECIAL_TOKENS[template])


def test_a_server_adds_the_series_system_message_where_there_is_none(series: Served) -> None:
    given = {"model": "qwen-7b-chat", "messages": MESSAGES[1:]}
    assert prompt_text(series, **given) == f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{QWEN}"


@pytest.fixture(scope="module")
def container(base: Path) -> Iterator[Served]:
    with until_the_end(Served(environ={"MODEL_PATH": str(base)}, command=RUN)) as started:
        yield started


@pytest.mark.spec("S-DEP-011", "S-DEP-012", "S-DEP-015f", "S-SRV-002:templates", "S-SRV-004:model-directory")
def test_a_container_takes_name_and_template_from_the_models_directory(container: Served) -> None:
    assert [card["id"] for card in fetch(container, "GET", "/v1/models").json["data"]] == ["Baichuan2-13B-Chat"]
    assert prompt_text(container) == BAICHUAN2


@pytest.mark.spec("S-DEP-040", "S-DEP-041", "S-DEP-042:run", "S-API-015:run")
def test_the_clients_of_a_container_are_answered(container: Served) -> None:
    plain = chat(container, temperature=0.0, max_tokens=16)
    assert (plain.status, plain.json["model"]) == (200, "Baichuan2-13B-Chat")
    streamed = chat(container, temperature=0.0, max_tokens=16, stream=True)
    assert streamed.status == 200
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    with openai.OpenAI(
        base_url=container.url.replace("0.0.0.0", "127.0.0.1"), api_key="EMPTY", max_retries=0
    ) as client:
        asked: Any = {"model": "model", "messages": HELLO, "temperature": 0.7, "top_p": 1.0, "max_tokens": 128}
        assert client.chat.completions.create(**asked).model == "Baichuan2-13B-Chat"
        said = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(stream=True, **asked)]
        assert any(said)
    drawn = [chat(container, seed=3, **fields).json["choices"] for fields in ({}, {"temperature": 0.7})]
    assert drawn[0] == drawn[1] != chat(container, seed=3, temperature=1.0).json["choices"]


@pytest.mark.spec("S-SRV-038", "S-DEP-013", "S-DEP-015a", "S-DEP-015h", "S-DEP-016", "S-DEP-031")
def test_a_variable_beats_the_directory_and_a_template_belongs_to_its_model(base: Path, glm: Path) -> None:
    environ = {"MODEL_PATH": str(base), "CONV_TEMPLATE": "generate", "MODEL_ID": "Foo"}
    with until_the_end(Served(f"--also={glm}=glm", environ=environ, command=RUN)) as served:
        assert [card["id"] for card in fetch(served, "GET", "/v1/models").json["data"]] == ["Foo", "glm"]
        assert prompt_text(served) == "SU1A1U2"
        assert prompt_text(served, model="glm") == CHATGLM3
        ends = [
            (choice["finish_reason"], choice["stop_reason"], END in choice["token_ids"][:-1], choice["token_ids"][-1])
            for choice in chat(served, model="glm", **DRAWN).json["choices"]
        ]
        stopped = [end for end in ends if end[0] == "stop"]
        assert stopped
        assert set(stopped) <= {("stop", None, False, END), ("stop", None, False, 0)}
        assert ("stop", None, False, END) in stopped
        ignoring = chat(served, model="glm", ignore_eos=True, **DRAWN).json["choices"]
        assert {choice["finish_reason"] for choice in ignoring} == {"length"}
        assert any(END in choice["token_ids"] for choice in ignoring)


@pytest.mark.spec("S-DEP-016")
def test_a_given_template_beats_the_variable_and_the_directory(base: Path) -> None:
    environ = {"MODEL_PATH": str(base), "CONV_TEMPLATE": "generate"}
    with until_the_end(Served("--chat-template={{ 'given' }}", environ=environ, command=RUN)) as served:
        assert prompt_text(served) == "given"


@pytest.mark.spec("S-DEP-013", "S-DEP-015b", "S-DEP-031")
@pytest.mark.parametrize("template", ["nope", "shennong_chat"])
def test_a_template_that_cannot_be_used_ends_the_start_with_78(base: Path, template: str) -> None:
    environ = {**os.environ, "MODEL_PATH": str(base), "CONV_TEMPLATE": template}
    argv = [sys.executable, "-m", *RUN]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 78
    named = CONV_TEMPLATES if template == "nope" else ("shennong_chat is not public", "--chat-template")
    assert all(word in done.stderr for word in named)


def test_a_program_gets_the_same_template_and_its_end_tokens(glm: Path) -> None:
    params = SamplingParams(temperature=2.0, seed=5, n=16, max_tokens=60)
    with LLM(str(glm), **FLAGS) as llm:
        (answer,) = llm.chat(MESSAGES, params, use_tqdm=False)
        assert answer.prompt == CHATGLM3
        ended = [output for output in answer.outputs if output.token_ids[-1] == END]
        assert {(output.finish_reason, output.stop_reason) for output in ended} == {("stop", None)}
        (own,) = llm.chat(MESSAGES, params, use_tqdm=False, chat_template="{{ 'given' }}")
        assert own.prompt == "given"
        assert any(END in output.token_ids[:-1] for output in own.outputs)
    with LLM(str(glm), conv_template="generate", **FLAGS) as llm:
        assert llm.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt == "SU1A1U2"
