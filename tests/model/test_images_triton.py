"""Prompts with images on the GPU kernels, under the interpreter: what transformers answers, whatever a step has."""

from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.shared.parameters.sampling import SamplingParams
from tests.model.harness import few_blocks, greedy
from tests.model.recomputed import Recomputed, graphs_of
from tests.model.test_images import ASKED, BEHIND, ONE, PLACE, Imaged, run, words
from tests.support.slow import slow_but
from tests.vision_models import FAMILIES, IMAGE_PAD, VISION_START, image, make_vision_model, vision_log_probabilities

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
NUM = 3
WHOLE, CHUNKS = (CoreLimits(max_num_seqs=8, max_num_batched_tokens=tokens) for tokens in (256, 9))


def made(tmp_path: Path, family: str) -> Imaged:
    return Imaged(make_vision_model(tmp_path, family))


# The quick ones have positions in rows and columns and embeddings for further layers, or tokens of an image that attend
# to each other in layers with and without windows.
@pytest.mark.parametrize("family", slow_but(["qwen3_vl", "gemma3"], FAMILIES))
def test_log_probabilities_and_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    imaged = made(tmp_path, family)
    for limits in (WHOLE, CHUNKS):
        engine = imaged.engine(limits, "triton")
        params = SamplingParams(
            max_tokens=NUM, temperature=0.0, ignore_eos=True, logprobs=engine.worker.facts().vocab_size
        )
        for number, asked in enumerate(ASKED):
            engine.core.add(imaged.spec(f"{number}", *asked, params))
        found: dict[str, list[tuple[int, np.ndarray]]] = {f"{number}": [] for number in range(len(ASKED))}
        while engine.core.sequences:
            for outcome in engine.step():
                for token, report in zip(outcome.token_ids, outcome.logprobs, strict=True):
                    order = np.argsort(report.top_token_ids)
                    found[outcome.sequence_id].append((token, np.array(report.top_logprobs)[order]))
        for asked, answer in zip(ASKED, found.values(), strict=True):
            assert [token for token, _ in answer] == imaged.expected(*asked, NUM)
            expected = vision_log_probabilities(tmp_path, *asked).numpy()
            np.testing.assert_allclose(answer[0][1], expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "qwen3_5", "qwen3_vl"])
def test_a_preempted_sequence_goes_on_with_its_images(family: str, tmp_path: Path) -> None:
    imaged = made(tmp_path, family)
    engine = imaged.engine(
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=64),
        "triton",
        num_gpu_blocks_override=few_blocks(tmp_path, 5),
        swap_space=0.0,
    )
    specs = [imaged.spec(f"{number}", *each, greedy(12)) for number, each in enumerate(ASKED)]
    assert run(engine, specs) == [imaged.expected(*each, 12) for each in ASKED]
    assert engine.core.counters().preemptions


@pytest.mark.parametrize("deterministic", slow_but([False], [False, True]))
@pytest.mark.parametrize("family", slow_but(["gemma3"], ["gemma3", "gemma4_mutual", "qwen2_5_vl"]))
def test_a_prefix_in_the_cache_ends_inside_an_image(family: str, deterministic: bool, tmp_path: Path) -> None:
    imaged = made(tmp_path, family)
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64)
    engine, plain = imaged.engine(limits, "triton", deterministic=deterministic), imaged.engine(limits)
    inside = set[int]()
    # What is left of an image are all tokens of it but one, a few of them, or the last one alone.
    for before, behind in ((15, []), (20, BEHIND), (17, [])):
        spec = imaged.spec("a", [*words(before - 1, 6), VISION_START, IMAGE_PAD, *behind], [ONE], greedy(NUM))
        expected = run(plain, [spec])
        for _ in range(2):
            assert run(engine, [spec]) == expected
        inside.add(engine.cached["a"] - before)
    if family == "gemma3":
        assert inside == {1, 12, 15}


def test_the_cache_knows_one_image_from_another(tmp_path: Path) -> None:
    imaged = made(tmp_path, "qwen2_vl")
    engine, prompt, other = imaged.engine(None, "triton"), [*PLACE, *words(20, 4)], image(100, 80, 9)
    for name, file, cached in (("first", ONE, 0), ("other", other, 0), ("again", ONE, 32)):
        assert run(engine, [imaged.spec(name, prompt, [file], greedy(NUM))]) == [imaged.expected(prompt, [file], NUM)]
        assert engine.cached[name] == cached


def test_tokens_behind_an_image_are_computed_by_graphs(tmp_path: Path) -> None:
    imaged = made(tmp_path, "qwen2_5_vl")
    engine = imaged.engine(WHOLE, "triton")
    worker, recomputed = engine.worker, Recomputed()
    assert isinstance(worker, TritonWorker)
    with torch.inference_mode():
        worker._graphs = worker._capture(graphs_of(worker), recomputed)
    # Of the last prompt one token is left to compute, that of the image: such a step runs without a graph. PyTorch's
    # operations say what comes then: `generate` of transformers has other positions behind a prompt that ends so.
    alone = imaged.spec("alone", [VISION_START, IMAGE_PAD], [ONE], greedy(NUM))
    ends = [*words((1 - alone.num_prompt_tokens) % 16 + 16, 5), VISION_START, IMAGE_PAD], [ONE]
    plain = imaged.engine(WHOLE)
    for asked in (ASKED[0], ends, ends):
        recomputed.replayed.clear()
        spec = imaged.spec("a", *asked, greedy(NUM))
        assert run(engine, [spec]) == run(plain, [spec])
        assert len(recomputed.replayed) == NUM - 1
    assert [share.num_tokens for share in engine.plans[-NUM].scheduled] == [1]
