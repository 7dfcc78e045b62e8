"""Images in chat requests to a server: what is answered and refused, and what survives the death of processes."""

import base64
import io
import json
import os
import signal
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tokenizers import Tokenizer

from antiphon.cli import main
from antiphon.services.vision.encoder import load_encoder
from antiphon.shared.flags import SettingsError
from tests.system.models.greedy_streams import engines_of, kill_one
from tests.system.served import Served, fetch, serve_tiny, slowed, until_the_end, wait_until
from tests.vision_models import image, make_vision_model, vision_reference

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(240)]
NUM = 16
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ONE, TWO, TALL, GIF = (
    image(100, 80, 1),
    image(60, 200, 2, "JPEG"),
    image(40, 230, 3, "WEBP"),
    image(90, 70, 4, "GIF"),
)


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def part(file: bytes, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file, kind)}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    flags = (
        "--enabe_mm",
        "--limit-mm-per-prompt=image=4,video=0",
        "--dtype=float32",
        "--engines=2",
        "--threads=1",
        "--kv-cache-memory-gb=0.1",
    )
    with until_the_end(serve_tiny(model, *flags)) as started:
        yield started


def expected(model: Path, content: Sequence[bytes | str], num_tokens: int = NUM) -> tuple[int, str]:
    """How many tokens the prompt has, and what transformers writes after it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "".join(PLACE if isinstance(each, bytes) else each for each in content)
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    files = [each for each in content if isinstance(each, bytes)]
    ids = tokenizer.encode(rendered, add_special_tokens=False).ids
    whole, output = vision_reference(model, ids, files, num_tokens)
    return len(whole), tokenizer.decode(output)


def ask(served: Served, content: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "temperature": 0, "max_tokens": NUM, "ignore_eos": True}
    return fetch(
        served, "POST", "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}], **fields}
    )


def text_of(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


@pytest.mark.spec("S-SRV-090", "S-API-043:images")
def test_images_are_answered_as_transformers_answers_them(served: Served, model: Path, client: openai.OpenAI) -> None:
    asked: list[tuple[list[Any], list[bytes | str]]] = [
        ([words("What is this"), part(ONE)], ["What is this", ONE]),
        ([part(TWO, "jpeg"), words("and"), part(TALL, "webp"), part(ONE)], [TWO, "and", TALL, ONE]),
        ([part(GIF, "gif"), words("end")], [GIF, "end"]),
    ]
    for content, reference in asked:
        length, text = expected(model, reference)
        messages: Any = [{"role": "user", "content": content}]
        fields: Any = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": NUM}
        whole = client.chat.completions.create(**fields, extra_body={"ignore_eos": True})
        assert whole.choices[0].message.content == text
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == length
        chunks = client.chat.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
        assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    drawn: Any = {**fields, "temperature": 1, "seed": 7}
    alone, three = (client.chat.completions.create(**drawn, n=n).choices for n in (1, 3))
    assert three[0].message.content == alone[0].message.content
    assert len({choice.message.content for choice in three}) > 1


def test_every_api_takes_images(served: Served, model: Path, client: openai.OpenAI) -> None:
    length, text = expected(model, ["What is this", ONE])
    answered: list[str] = []

    said: Any = {"type": "input_text", "text": "What is this"}
    shown: Any = {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"}
    fields: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": NUM, "extra_body": {"ignore_eos": True}}
    response = client.responses.create(input=[{"role": "user", "content": [said, shown]}], **fields)
    assert response.usage is not None
    assert (response.output_text, response.usage.input_tokens) == (text, length)
    content: Any = [shown, {**said, "text": "<|image_pad|>"}]
    with pytest.raises(openai.BadRequestError, match="2 places for 1 images") as told:
        client.responses.create(input=[{"role": "user", "content": content}], **fields)
    assert told.value.param == "input"
    more = client.responses.create(input="and", previous_response_id=response.id, **fields)
    turns = [[words("What is this"), part(ONE)], text, "and"]
    messages = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    assert more.output_text == text_of(ask(served, None, messages=messages))

    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    blocks: Any = [words("What is this"), {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key="EMPTY") as api:
        conversation: Any = {"model": "tiny", "messages": [{"role": "user", "content": blocks}]}
        message = api.messages.create(max_tokens=NUM, extra_body={"temperature": 0}, **conversation)
        answered += [block.text for block in message.content if block.type == "text"]
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == length
        assert api.messages.count_tokens(**conversation).input_tokens == length

    native = {"messages": messages[:1], "sampling_params": {"temperature": 0, "max_tokens": NUM, "ignore_eos": True}}
    assert fetch(served, "POST", "/generate", native).json["outputs"][0]["text"] == text
    tokens = fetch(served, "POST", "/tokenize", {"messages": messages[:1], "return_token_strs": True}).json
    assert (tokens["count"], len(tokens["tokens"]), len(tokens["token_strs"])) == (length, length, length)

    # Ollama's images are before the text.
    asked = {"model": "tiny", "stream": False, "options": {"temperature": 0, "num_predict": NUM}}
    images = {"images": [source["data"]]}
    said = {"role": "user", "content": "What is this", **images}
    chat = fetch(served, "POST", "/api/chat", {**asked, "messages": [said]}).json
    single = fetch(served, "POST", "/api/generate", {**asked, "prompt": "What is this", **images}).json
    length, first = expected(model, [ONE, "What is this"])
    assert chat["prompt_eval_count"] == length
    assert chat["message"]["content"] == single["response"]
    assert "vision" in fetch(served, "POST", "/api/show", {"model": "tiny"}).json["capabilities"]
    # These APIs have no way to go on behind the end of the text.
    for answer, whole in ((answered[0], text), (single["response"], first)):
        assert answer
        assert whole.startswith(answer)


def test_the_same_text_with_another_image_is_another_prompt(served: Served, model: Path) -> None:
    long = "the and of to in that is was " * 8
    first, second = image(100, 80, 21), image(100, 80, 22)
    for file in (first, second, first):
        answer = ask(served, [part(file), words(long)])
        assert text_of(answer) == expected(model, [file, long])[1]
    assert text_of(ask(served, long)) == expected(model, [long])[1]


def test_a_stream_goes_on_when_its_engine_dies(served: Served, model: Path, client: openai.OpenAI) -> None:
    content: Any = [words("Once"), part(image(120, 60, 5)), words("upon")]
    text = expected(model, ["Once", image(120, 60, 5), "upon"], 400)[1]
    has_died = False
    while not has_died:  # On a very busy machine, the stream may end before this process has looked.
        engines = engines_of(served, "engine-")
        with slowed(*engines.values()) as slow:
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            parts = [next(stream).choices[0].delta.content or "" for _ in range(3)]
            with slow.frozen():
                has_died = kill_one(served, engines)
        parts += [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(parts) == text


def test_texts_go_on_without_the_image_service_which_comes_back(served: Served, model: Path) -> None:
    os.kill(served.pids()["vision-1"], signal.SIGKILL)
    assert text_of(ask(served, "still there")) == expected(model, ["still there"])[1]
    new = image(70, 70, 6)
    assert text_of(ask(served, [part(new)])) == expected(model, [new])[1]
    topology = fetch(served, "GET", "/admin/topology").json
    assert "vision-1" in [one["id"] for one in topology["lost"]]
    [found] = [one for one in topology["members"] if one["service"] == "vision"]
    assert found["resources"]["rss_bytes"] > 0


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int) -> bytes:
    """A small file that says it has many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


REFUSED = {
    "10000 x 10000 pixels": data_url(png_of_size(10_000, 10_000)),
    "one side is more than 200": data_url(png_of_size(60_000, 1)),
    "is damaged": data_url(ONE[: len(ONE) // 2]),
    "not an image in one of the formats": data_url(b"%PDF-1.7, no image"),
    "one of the types": "data:image/svg+xml;base64,AAAA",
    "base64 is damaged": "data:image/png;base64,%%%%",
    "data URL in base64": "data:image/png,abc",
    "data URL with an image": "file:///etc/passwd",
    "not fetched from '127.0.0.1'": "http://127.0.0.1/image.png",
    "has no bytes": "data:image/png;base64,",
}


@pytest.mark.spec("S-API-043:images")
def test_what_is_no_image_is_refused_by_its_name(served: Served) -> None:
    for told, url in REFUSED.items():
        answer = ask(served, [words("a"), {"type": "image_url", "image_url": {"url": url}}])
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, "messages[0].content[1].image_url"), (told, error)
        assert told in error["message"]
    many = ask(served, [words("a"), *[part(ONE)] * 6])
    assert (many.status, many.json["error"]["param"]) == (400, "messages[0].content[5].image_url")
    assert "at most 4 images on this server, and this one has 6" in many.json["error"]["message"]
    assert ask(served, [part(ONE)] * 4).status == 200
    sized = ask(served, [{"type": "image_url", "image_url": {"url": data_url(ONE), "detail": "high"}}])
    assert (sized.status, sized.headers["x-antiphon-ignored"]) == (200, "messages[].content[].image_url.detail")
    token = ask(served, [part(ONE), words("<|image_pad|>")])
    assert (token.status, token.json["error"]["param"]) == (400, "messages")
    assert text_of(ask(served, "still there"))


def test_a_model_is_asked_about_images_in_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.png").write_bytes(ONE)
    directory = make_vision_model(tmp_path / "model", "smolvlm")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is this\n"))
    with until_the_end(serve_tiny(directory, "--enable-mm", "--dtype=float32")) as started:
        asked = ["chat", f"--server={started.url}", "--temperature=0", f"--max-tokens={NUM}"]
        assert main([*asked, f"--image={tmp_path}/one.png"]) == 0
    answer = capsys.readouterr().out.removesuffix("\n")
    text = expected(directory, [ONE, "What is this"])[1]
    assert answer
    assert text.startswith(answer)


def test_the_image_service_is_counted(served: Served) -> None:
    wait_until(lambda: b"antiphon:vision_cached_bytes{" in fetch(served, "GET", "/metrics").body, 60)


@pytest.mark.spec("S-SRV-090", "S-SRV-091")
def test_settings_that_cannot_be_are_refused_at_the_start(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*flags: str) -> str:
        assert main(["serve", "--port=0", *flags]) == 78
        return capsys.readouterr().err

    for flag in ("--enable-mm", "--enable_mm", "--enabe-mm", "--enabe_mm"):
        assert "this model takes text only" in refused(flag)
    eye = f"--model={model}"
    assert "--mm-processor-kwargs: { is not JSON" in refused(eye, "--enable-mm", "--mm-processor-kwargs={")
    assert "is not a JSON object" in refused(eye, "--enable-mm", "--mm_processor_kwargs=[1]")
    assert "needs --enable-mm" in refused(eye, '--mm-processor-kwargs={"max_pixels": 50176}')
    for wrong in ("image=33", '{"image": -1}', "video=1", "4", "image"):
        assert "--limit-mm-per-prompt" in refused(eye, "--enable-mm", f"--limit-mm-per-prompt={wrong}")
    with pytest.raises(SettingsError, match="has no argument 'pixels_max'"):
        load_encoder(model, {"pixels_max": 1}, "cpu")
    with pytest.raises(SettingsError, match="follows from the model's weights"):
        load_encoder(model, {"patch_size": 7}, "cpu")


@pytest.mark.spec("S-SRV-091")
def test_the_arguments_of_the_processor_decide_how_large_images_are(model: Path) -> None:
    plain = load_encoder(model, {}, "cpu").encode_file(image(300, 300, 7))
    smaller = load_encoder(model, json.loads('{"max_pixels": 12544}'), "cpu").encode_file(image(300, 300, 7))
    assert (plain.num_tokens, smaller.num_tokens) == (49, 9)
