"""Prompts with images: equal to transformers, alone, mixed, in chunks, preempted, from the cache and as choices."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from antiphon.services.engine.core.invariants import check
from antiphon.services.engine.core.plan import CoreLimits, PlacedImage
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.models.registry import find_family
from antiphon.services.vision.encoder import VisionEncoder
from antiphon.services.vision.images import open_image
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request.images import plain_places
from tests.model.harness import Engine, few_blocks, greedy, make_prompt, make_worker
from tests.model.test_parallel import ranks_of
from tests.models import make_model
from tests.support.slow import slow_but
from tests.vision_models import (
    FAMILIES,
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    image,
    make_vision_model,
    vision_log_probabilities,
    vision_reference,
)

pytestmark = pytest.mark.model
NUM = 10
TORCH_ONLY = ("gemma3", "gemma4_mutual", "qwen3_vl", "qwen3_vl_moe")
"""The tokens of an image attend to each other, or have embeddings for the outputs of layers."""
QUICK_FAMILIES = ("qwen2_5_vl", "qwen3_5", "qwen3_vl", "gemma3", "gemma4", "llava_onevision", "mistral3", "idefics3")
PLACE = [VISION_START, IMAGE_PAD, VISION_END]


def words(length: int, seed: int) -> list[int]:
    return [min(token, VISION_START - 1) for token in make_prompt(length, seed)]


BEFORE, BEHIND = words(7, 1), words(5, 2)


class Imaged:
    """A model with its vision encoder, and engines that take its images."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.encoder = VisionEncoder(directory, {}, torch.float32, "cpu")

    def engine(self, limits: CoreLimits | None = None, backend: str = "torch", **overrides: object) -> Engine:
        return Engine(
            self.directory,
            limits or CoreLimits(max_num_seqs=8, max_num_batched_tokens=256),
            backend,
            enable_mm=True,
            **overrides,
        )

    def placed(self, whole: Sequence[int], files: Sequence[bytes]) -> tuple[PlacedImage, ...]:
        found, start = list[PlacedImage](), 0
        for file in files:
            one = self.encoder.encode(open_image(file))
            plain = plain_places(one.layout, IMAGE_PAD)
            # Some images begin with other tokens than those of their embeddings.
            before = next((place for place, each in enumerate(plain) if each != place), len(plain))
            start = whole.index(IMAGE_PAD, start) - before
            key = hashlib.sha256(file).digest()
            image = PlacedImage(
                start=start, num_tokens=one.num_tokens, rows=one.rows, columns=one.columns,
                key=key, embeddings=one.embeddings, dtype=one.dtype, plain=plain,
            )  # fmt: skip
            found.append(image)
            start += one.num_tokens
        return tuple(found)

    def spec(self, name: str, prompt: list[int], files: Sequence[bytes], params: SamplingParams) -> SequenceSpec:
        whole, _ = vision_reference(self.directory, prompt, files, 1)
        return SequenceSpec(
            sequence_id=name, prompt_token_ids=tuple(whole), params=params, images=self.placed(whole, files)
        )

    def expected(self, prompt: list[int], files: Sequence[bytes], num_tokens: int = NUM) -> list[int]:
        return vision_reference(self.directory, prompt, files, num_tokens)[1]


def run(engine: Engine, specs: Sequence[SequenceSpec]) -> list[list[int]]:
    output: dict[str, list[int]] = {spec.sequence_id: [] for spec in specs}
    for spec in specs:
        engine.core.add(spec)
    while any(name in engine.core for name in output):
        for outcome in engine.step():
            output[outcome.sequence_id] += outcome.token_ids
            engine.cached[outcome.sequence_id] = outcome.num_cached_tokens
        check(engine.core)
    return list(output.values())


@pytest.fixture(scope="module", params=slow_but(QUICK_FAMILIES, FAMILIES))
def imaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imaged:
    return Imaged(make_vision_model(tmp_path_factory.mktemp("vision"), request.param))


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_5"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imaged:
    """With keys and values alone, and with recurrent states."""
    old = request.param == "qwen2_vl"
    return Imaged(make_vision_model(tmp_path_factory.mktemp("vision"), request.param, old_config=old))


ONE, TWO, TALL = image(100, 80, 1), image(90, 90, 2, "JPEG"), image(40, 230, 3, "WEBP")
ASKED: tuple[tuple[list[int], tuple[bytes, ...]], ...] = (
    ([*BEFORE, *PLACE, *BEHIND], (ONE,)),
    ([*PLACE, *BEHIND, *PLACE, *PLACE], (TALL, ONE, TWO)),
    (words(20, 3), ()),
    ([*PLACE], (TWO,)),
)


def test_equal_to_transformers_alone_and_mixed_with_text(imaged: Imaged) -> None:
    expected = [imaged.expected(*each) for each in ASKED]
    engine = imaged.engine()
    for number, each in enumerate(ASKED):
        assert run(engine, [imaged.spec(f"alone-{number}", *each, greedy(NUM))]) == [expected[number]]
    together = imaged.engine(CoreLimits(max_num_seqs=8, max_num_batched_tokens=9))
    specs = [imaged.spec(f"mixed-{number}", *each, greedy(NUM)) for number, each in enumerate(ASKED)]
    assert run(together, specs) == expected


@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "llava_onevision",
        "mistral3",
        "qwen3_vl",
        "qwen3_5",
        "smolvlm",
    ],
)
def test_log_probabilities_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    imaged = Imaged(make_vision_model(tmp_path, family))
    for limits in (
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=256),
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=9),
    ):
        engine = imaged.engine(limits)
        size = engine.worker.facts().vocab_size
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=size)
        for prompt, files in ASKED:
            engine.core.add(imaged.spec("a", prompt, files, params))
            [report] = [each for _ in range(40) for outcome in engine.step() for each in outcome.logprobs]
            found = torch.empty(size)
            found[list(report.top_token_ids)] = torch.tensor(report.top_logprobs, dtype=torch.float32)
            torch.testing.assert_close(found, vision_log_probabilities(tmp_path, prompt, files), rtol=0, atol=1e-4)


@pytest.mark.spec("S-SRV-070", "S-SRV-071", "S-SRV-090")
@pytest.mark.parametrize(
    ("family", "tp_size", "pp_size", "num_blocks"),
    [
        ("qwen2_5_vl", 2, 2, 7),
        ("glm4v", 2, 1, 7),
        ("llava_onevision", 2, 1, 18),
        ("gemma3", 1, 2, 7),
        ("qwen3_vl", 2, 1, 7),
        ("mistral3", 1, 2, 8),
    ],
)
def test_ranks_take_images_as_one_process_does(
    family: str, tp_size: int, pp_size: int, num_blocks: int, tmp_path: Path
) -> None:
    imaged = Imaged(make_vision_model(tmp_path, family))
    specs = [imaged.spec(f"{number}", *each, greedy(30)) for number, each in enumerate(ASKED)]
    # Few blocks, so that sequences with images are preempted and sent again.
    ranks = ranks_of(tmp_path, tp_size, pp_size, enable_mm=True, num_gpu_blocks_override=num_blocks, swap_space=0.0)
    engine = Engine.around(ranks, CoreLimits(max_num_seqs=4, max_num_batched_tokens=9))
    assert run(engine, specs) == [imaged.expected(*each, 30) for each in ASKED]
    assert engine.core.counters().preemptions


@pytest.mark.parametrize("family", slow_but(QUICK_FAMILIES, [one for one in FAMILIES if one not in TORCH_ONLY]))
def test_the_fast_backend_takes_images(family: str, tmp_path: Path) -> None:
    imaged = Imaged(make_vision_model(tmp_path, family))
    specs = [imaged.spec(f"{number}", *each, greedy(NUM)) for number, each in enumerate(ASKED)]
    for limits in (
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=256),
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=9),
    ):
        assert run(imaged.engine(limits, "native"), specs) == [imaged.expected(*each) for each in ASKED]


def test_names_and_fields_of_the_first_checkpoints_of_llava(tmp_path: Path) -> None:
    imaged = Imaged(make_vision_model(tmp_path, "llava"))
    expected = imaged.expected(*ASKED[1])
    spec = imaged.spec("a", *ASKED[1], greedy(NUM))
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    assert VisionEncoder(tmp_path, {}, torch.float32, "cpu").encode(Image.new("RGB", (9, 9))).num_tokens == 9
    assert run(imaged.engine(), [spec]) == [expected]
    first = {"architectures": ["LlavaForConditionalGeneration"], "torch_dtype": "float16", "model_type": "llava"}
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    description = find_family(first).describe({**first, "text_config": text})
    assert (description.num_layers, description.hidden_size, description.intermediate_size) == (32, 4096, 11008)
    with pytest.raises(ServiceError, match="decoder of type 'gemma'"):
        find_family(first).describe({**first, "text_config": {"model_type": "gemma"}})


def test_a_config_of_the_first_checkpoints_is_read(one: Imaged) -> None:
    assert run(one.engine(), [one.spec("a", *ASKED[1], greedy(NUM))]) == [one.expected(*ASKED[1])]


def check_preemption(one: Imaged) -> None:
    for swap in (0.0, 0.01):
        engine = one.engine(
            CoreLimits(max_num_seqs=4, max_num_batched_tokens=64),
            num_gpu_blocks_override=few_blocks(one.directory, 7),
            swap_space=swap,
        )
        specs = [one.spec(f"p-{number}", *each, greedy(30)) for number, each in enumerate(ASKED)]
        assert run(engine, specs) == [one.expected(*each, 30) for each in ASKED]
        assert engine.core.counters().preemptions


def test_a_preempted_sequence_goes_on_with_its_images(one: Imaged) -> None:
    check_preemption(one)


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Imaged:
    return Imaged(make_vision_model(tmp_path_factory.mktemp("vision"), "gemma3"))


def test_tokens_of_a_image_see_each_other_whatever_a_step_has_of_the_prompt(mutual: Imaged) -> None:
    check_preemption(mutual)
    engine = mutual.engine(CoreLimits(max_num_seqs=4, max_num_batched_tokens=64))
    inside = set[int]()
    # Blocks of 16 tokens end inside images, so that a prompt found in the cache goes on inside one. Some of the
    # prompts end with an image, whose last token alone is then computed.
    for before in (15, 17, 20):
        for behind in ([], words(3, 7), words(30, 8)):
            asked = [*words(before, 6), IMAGE_PAD, *behind], [ONE]
            expected = mutual.expected(*asked)
            for _ in range(2):
                assert run(engine, [mutual.spec("a", *asked, greedy(NUM))]) == [expected]
            inside.add(engine.cached["a"] - before)
    assert {1, 12, 15} <= inside


def test_a_window_shorter_than_an_image_keeps_the_image_that_is_seen_whole(tmp_path: Path) -> None:
    directory = make_vision_model(tmp_path, "gemma3")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["sliding_window"] = 6
    (directory / "config.json").write_text(json.dumps(config))
    imaged = Imaged(directory)
    engine, asked = imaged.engine(block_size=4), ([*words(41, 6), IMAGE_PAD], [ONE])
    assert engine.core.facts.window == 16, "the tokens of an image"
    for _ in range(2):
        assert run(engine, [imaged.spec("a", *asked, greedy(NUM))]) == [imaged.expected(*asked)]
    assert engine.cached["a"] > 41, "a prefix that ends inside the image"


def test_a_step_has_a_image_whole(mutual: Imaged) -> None:
    engine = mutual.engine(CoreLimits(max_num_seqs=4, max_num_batched_tokens=9))
    prompt = [*words(5, 6), IMAGE_PAD, *words(2, 7)]
    assert run(engine, [mutual.spec("a", prompt, [ONE], greedy(NUM))]) == [mutual.expected(prompt, [ONE])]
    shares = [(each.start, each.num_tokens) for plan in engine.plans for each in plan.scheduled]
    assert shares[:3] == [(0, 5), (5, 16), (21, 2)]


def test_layers_that_images_add_to_are_in_the_first_stage(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    with pytest.raises(SettingsError, match="its first 2 layers, and the first of 2 stages has 1"):
        ranks_of(tmp_path, 1, 2, enable_mm=True)


def test_the_cache_knows_one_image_from_another(one: Imaged) -> None:
    engine, prompt = one.engine(), [*BEFORE, *PLACE, *words(40, 4)]
    # Of the same size, so that all tokens are equal.
    other = image(100, 80, 9)
    assert run(engine, [one.spec("first", prompt, [ONE], greedy(NUM))]) == [one.expected(prompt, [ONE])]
    assert run(engine, [one.spec("other", prompt, [other], greedy(NUM))]) == [one.expected(prompt, [other])]
    assert run(engine, [one.spec("again", prompt, [ONE], greedy(NUM))]) == [one.expected(prompt, [ONE])]
    assert (engine.cached["first"], engine.cached["other"], engine.cached["again"]) == (0, 0, 48)
    # The tokens of so small a model may be equal.
    by_one, by_other = (vision_log_probabilities(one.directory, prompt, [each]) for each in (ONE, other))
    assert (by_one - by_other).abs().max() > 1e-3


def test_output_that_was_generated_elsewhere_is_continued(one: Imaged) -> None:
    prompt, files = ASKED[1]
    expected, spec = one.expected(prompt, files), one.spec("moved", prompt, files, greedy(NUM))
    moved = SequenceSpec(
        sequence_id="moved",
        prompt_token_ids=spec.prompt_token_ids,
        params=spec.params,
        output_token_ids=tuple(expected[:4]),
        images=spec.images,
    )
    assert run(one.engine(), [moved]) == [expected[4:]]


def test_choices_of_one_prompt_share_its_images(one: Imaged) -> None:
    engine, (prompt, files) = one.engine(), ASKED[0]
    specs = [one.spec(f"choice-{number}", prompt, files, greedy(NUM)) for number in range(3)]
    family = [
        SequenceSpec(
            sequence_id=each.sequence_id,
            prompt_token_ids=each.prompt_token_ids,
            params=each.params,
            sequence_group="f",
            images=each.images,
        )
        for each in specs
    ]
    assert run(engine, family) == [one.expected(prompt, files)] * 3


def test_without_images_a_model_that_takes_them_answers_text(one: Imaged) -> None:
    prompt = words(30, 5)
    engine = Engine(one.directory, CoreLimits(max_num_seqs=8, max_num_batched_tokens=256), "native")
    assert run(engine, [SequenceSpec(sequence_id="text", prompt_token_ids=tuple(prompt), params=greedy(NUM))]) == [
        one.expected(prompt, [])
    ]
    with pytest.raises(ServiceError, match="--enable-mm"):
        engine.core.add(one.spec("image", *ASKED[0], greedy(NUM)))


def test_what_cannot_be_served_is_refused(one: Imaged, tmp_path: Path) -> None:
    engine, spec = one.engine(), one.spec("a", *ASKED[0], greedy(NUM))
    with pytest.raises(ServiceError, match="Log probabilities of the prompt"):
        engine.core.add(
            SequenceSpec(
                sequence_id="b",
                prompt_token_ids=spec.prompt_token_ids,
                params=SamplingParams(prompt_logprobs=1),
                images=spec.images,
            )
        )
    with pytest.raises(ServiceError, match="do not lie in the prompt"):
        engine.core.add(
            SequenceSpec(
                sequence_id="c", prompt_token_ids=spec.prompt_token_ids[:4], params=greedy(), images=spec.images
            )
        )
    text = make_model(tmp_path, "llama")
    with pytest.raises(SettingsError, match="takes text only"):
        make_worker("torch", text, enable_mm=True)
