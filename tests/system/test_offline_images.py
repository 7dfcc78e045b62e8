"""Images in this process: in prompts, conversations and on the command line, as transformers answers them."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from antiphon import LLM, AsyncLLMEngine, SamplingParams
from antiphon.cli import main
from antiphon.shared.request.data_urls import data_url
from tests.models import make_model
from tests.system.offline import FLAGS, generate
from tests.vision_models import IMAGE_PAD, VIDEO_PAD, image, make_vision_model, vision_reference

pytestmark = [pytest.mark.system, pytest.mark.model]
NUM = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ONE, TWO = image(100, 80, 1), image(60, 200, 2, "JPEG")


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def seeing(eye: Path) -> Iterator[LLM]:
    with LLM(str(eye), enable_mm=True, limit_mm_per_prompt={"image": 2}, enable_prefix_caching=True, **FLAGS) as made:
        yield made


def pil(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def prompted(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images[0] if len(images) == 1 else list(images)}}


def expected(eye: Path, text: str, files: Sequence[bytes]) -> tuple[list[int], list[int]]:
    ids = Tokenizer.from_file(str(eye / "tokenizer.json")).encode(text).ids
    return vision_reference(eye, ids, files, NUM)


def ids(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.spec("S-OFF-029")
def test_prompts_with_images_are_answered_as_transformers_answers_them(seeing: LLM, eye: Path) -> None:
    one, both, plain = f"What is {PLACE} this", f"{PLACE} and {PLACE}", "no image"
    asked: list[Any] = [prompted(one, pil(ONE)), prompted(both, TWO, pil(ONE)), plain, prompted(one, pil(TWO))]
    found = generate(seeing, asked, GREEDY)
    wanted = [expected(eye, *each) for each in ((one, [ONE]), (both, [TWO, ONE]), (plain, []), (one, [TWO]))]
    assert ids(found) == [output for _, output in wanted]
    assert [output.prompt_token_ids for output in found] == [whole for whole, _ in wanted]
    tokens = seeing.get_tokenizer()(one)["input_ids"]
    by_ids = generate(seeing, [{"prompt_token_ids": tokens, "multi_modal_data": {"image": [pil(ONE)]}}], GREEDY)
    assert ids(by_ids) == [wanted[0][1]]
    assert (by_ids[0].num_cached_tokens or 0) > 0


@pytest.mark.spec("S-OFF-022")
def test_conversations_have_images_as_in_openais_api_or_of_pil(seeing: LLM, eye: Path) -> None:
    rendered = f"<|im_start|>user\nLook {PLACE}<|im_end|>\n<|im_start|>assistant\n"
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url(TWO)}},
        {"type": "image_pil", "image_pil": pil(TWO)},
    ]
    talks = [[{"role": "user", "content": [{"type": "text", "text": "Look "}, part]}] for part in parts]
    found = seeing.chat(talks, GREEDY, use_tqdm=False)
    assert ids(found) == [expected(eye, rendered, [TWO])[1]] * 2
    (plain,) = seeing.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)
    assert plain.error_msg is None


@pytest.mark.spec("S-OFF-006", "S-OFF-029")
def test_a_model_in_pipeline_stages_takes_images(eye: Path) -> None:
    prompt = f"What is {PLACE} this"
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "device": "cpu", "enable_mm": True, **FLAGS}
    with LLM(str(eye), **settings) as llm:
        found = generate(llm, [prompted(prompt, pil(ONE)), prompted(PLACE, TWO), "no image"], GREEDY)
    wanted = [expected(eye, *each)[1] for each in ((prompt, [ONE]), (PLACE, [TWO]), ("no image", []))]
    assert ids(found) == wanted


@pytest.mark.spec("S-OFF-029")
def test_what_gemma_expects_around_a_image_is_written_before_the_text_is_tokenized(tmp_path: Path) -> None:
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    directory = make_vision_model(tmp_path, "gemma3")
    begin, token, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        extra_special_tokens={"boi_token": begin, "image_token": token, "eoi_token": end},
    )
    processor: Any = Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(directory), tokenizer, image_seq_length=16)
    text = f"Look\n{begin}\n\nand {begin}now"
    whole = processor(images=[pil(ONE), pil(TWO)], text=text, add_special_tokens=True)["input_ids"][0]
    short = [each for place, each in enumerate(whole) if each != IMAGE_PAD or whole[place - 1] != IMAGE_PAD]
    with LLM(str(directory), enable_mm=True, **FLAGS) as llm:
        [found] = generate(llm, [prompted(text, pil(ONE), pil(TWO))], GREEDY)
        assert found.prompt_token_ids == whole
        assert ids([found]) == [vision_reference(directory, short, [ONE, TWO], NUM)[1]]
        talk = [{"role": "user", "content": [{"type": "image_pil", "image_pil": pil(ONE)}]}]
        [said] = llm.chat(talk, GREEDY, use_tqdm=False)
        assert (said.prompt_token_ids or []).count(IMAGE_PAD) == 16
        with pytest.raises(ValueError, match=r"has 1 places for 2 images.*'<\|vision_start\|>'"):
            generate(llm, [prompted(begin, ONE, TWO)], GREEDY)
    with pytest.raises(ValueError, match="do_pan_and_scan"):
        LLM(str(directory), enable_mm=True, mm_processor_kwargs={"do_pan_and_scan": True}, **FLAGS)


@pytest.mark.spec("S-OFF-029")
def test_rows_of_a_image_of_mistral_end_with_tokens_of_their_own(tmp_path: Path) -> None:
    directory = make_vision_model(tmp_path, "mistral3")
    text = "Look <|image_pad|> and <|image_pad|>"
    with LLM(str(directory), enable_mm=True, **FLAGS) as llm:
        [found] = generate(llm, [prompted(text, pil(ONE), TWO)], GREEDY)
    whole, output = expected(directory, text, [ONE, TWO])
    assert (found.prompt_token_ids, ids([found])) == (whole, [output])
    assert VIDEO_PAD in whole


@pytest.mark.spec("S-OFF-029")
def test_tiles_of_a_image_are_named_as_the_processor_of_idefics_names_them(tmp_path: Path) -> None:
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    directory = make_vision_model(tmp_path, "idefics3")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    processor: Any = Idefics3Processor(Idefics3ImageProcessorPil.from_pretrained(directory), tokenizer, image_seq_len=4)
    text, whole = "Look\n<image>\n\nand <image>now", list[list[int]]()
    for size in (112, 56):
        asked = processor(images=[pil(ONE), pil(TWO)], text=text, size={"longest_edge": size})
        whole.append(list(asked["input_ids"][0]))
    with LLM(str(directory), enable_mm=True, **FLAGS) as llm:
        [found] = generate(llm, [prompted(text, pil(ONE), TWO)], GREEDY)
    assert found.prompt_token_ids == whole[0]
    assert ids([found]) == [expected(directory, text, [ONE, TWO])[1]]
    # Images that are no larger than a tile are not cut.
    with LLM(str(directory), enable_mm=True, mm_processor_kwargs={"size": {"longest_edge": 56}}, **FLAGS) as llm:
        [found] = generate(llm, [prompted(text, pil(ONE), TWO)], GREEDY)
    assert found.prompt_token_ids == whole[1]
    assert len(whole[1]) < len(whole[0])


async def test_the_engine_for_asyncio_takes_images(eye: Path) -> None:
    engine = AsyncLLMEngine(str(eye), enable_mm=True, mm_processor_kwargs={"max_pixels": 12544}, **FLAGS)
    try:
        outputs = [output async for output in engine.generate(prompted(PLACE, pil(image(300, 300, 7))), GREEDY)]
    finally:
        await engine.shutdown()
    assert len(outputs[-1].prompt_token_ids or ()) == 9 + 2


def test_what_cannot_be_is_refused_before_anything_runs(seeing: LLM, model: Path) -> None:
    def refused(told: str, *prompts: Any, params: SamplingParams = GREEDY) -> None:
        with pytest.raises(ValueError, match=told):
            generate(seeing, list(prompts), params)

    refused("prompts\\[1\\]: The prompt has 3 images; at most 2", "a", prompted(PLACE * 3, ONE, ONE, ONE))
    refused(r"has 0 places for 1 images.*'<\|image_pad\|>'", prompted("a", ONE))
    refused("is not an image in one of the formats", prompted(PLACE, b"%PDF-1.7"))
    refused("one side is more than 200", prompted(PLACE, Image.new("RGB", (900, 2))))
    refused("'prompt_logprobs' cannot be", prompted(PLACE, ONE), params=SamplingParams(prompt_logprobs=1))
    refused("give them to LLM", {**prompted(PLACE, ONE), "mm_processor_kwargs": {"max_pixels": 1}})
    with pytest.raises(ValueError, match="have no embeddings"):
        seeing.embed(prompted(PLACE, ONE), use_tqdm=False)
    for url, told in (("https://example.org/a.png", "not fetched in this process"), ("file:///a.png", "data URL")):
        with pytest.raises(ValueError, match=told):
            seeing.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    with LLM(str(model), **FLAGS) as blind:
        with pytest.raises(ValueError, match="enable_mm=True"):
            generate(blind, [prompted("a", ONE)], GREEDY)
        with pytest.raises(ValueError, match="enable_mm=True"):
            blind.chat([{"role": "user", "content": [{"type": "image_pil", "image_pil": pil(ONE)}]}])


def test_a_model_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes text only"):
        LLM(str(make_model(tmp_path, "llama")), enable_mm=True, **FLAGS)


def test_the_command_line_takes_the_files_of_images(
    eye: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.png").write_bytes(ONE)
    flags = [f"--model={eye}", "--temperature=0", "--max-tokens=4", "--dtype=float32"]
    assert main(["complete", f"See {PLACE}", f"--image={tmp_path}/one.png", *flags]) == 0
    text = Tokenizer.from_file(str(eye / "tokenizer.json")).decode(expected(eye, f"See {PLACE}", [ONE])[1][:4])
    assert capsys.readouterr().out == text + "\n"
    assert main(["complete", "See", "--chat", f"--image={tmp_path}/one.png", *flags]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["complete", "See", f"--image={tmp_path}/two.png", *flags]) == 2
    assert "two.png cannot be read" in capsys.readouterr().err
