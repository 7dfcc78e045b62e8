"""LoRA adapters in the GPU kernels, under the interpreter: the tokens of the merged weights, in any mixture."""

from pathlib import Path

import pytest
import torch

from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.shared.blocks import adapter_salt
from tests.adapters import LLAMA_TARGETS, make_adapter, merge
from tests.model.harness import Engine, Models, greedy, make_prompt
from tests.model.recomputed import Recomputed, graphs_of
from tests.models import greedy_reference
from tests.support.slow import slow_but

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
NUM_TOKENS = 2
TARGETS = {
    "llama with biases": LLAMA_TARGETS,
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "qwen3 with experts": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "falcon_h1": LLAMA_TARGETS,
    "nemotron_h": ("q_proj", "o_proj", "up_proj", "down_proj"),
}


class Adapted:
    """An engine with adapters around a worker."""

    def __init__(self, model: Path, backend: str = "triton", max_loras: int = 4, **overrides: object) -> None:
        limits = CoreLimits(max_num_seqs=8, max_num_batched_tokens=256, max_loras=max_loras)
        options = {"enable_lora": True, "max_loras": max_loras, "max_cpu_loras": 8, **overrides}
        self.engine = Engine(model, limits, backend, **options)

    def load(self, path: Path) -> LoadedAdapter:
        library = getattr(self.engine.worker, "adapters", None)
        assert library is not None
        return library.load(path.name, str(path))

    def generate(self, asked: list[tuple[list[int], LoadedAdapter | None]]) -> list[list[int]]:
        output: dict[str, list[int]] = {f"{len(self.engine.plans)}-{number}": [] for number in range(len(asked))}
        for name, (prompt, adapter) in zip(output, asked, strict=True):
            salt = b"" if adapter is None else adapter_salt(b"", adapter.version)
            spec = SequenceSpec(
                sequence_id=name,
                prompt_token_ids=tuple(prompt),
                params=greedy(NUM_TOKENS),
                cache_salt=salt,
                adapter=adapter,
            )
            self.engine.core.add(spec)
        while self.engine.core.sequences:
            for outcome in self.engine.step():
                output[outcome.sequence_id] += outcome.token_ids
        return list(output.values())


@pytest.mark.parametrize("variant", slow_but(["gpt_neox", "qwen3 with experts"], TARGETS))
def test_an_adapter_gives_the_tokens_of_the_merged_weights(variant: str, models: Models, tmp_path: Path) -> None:
    model, prompt = models(variant), make_prompt(9)
    adapter = make_adapter(tmp_path / "a", model, targets=TARGETS[variant])
    merged = greedy_reference(merge(tmp_path / "merged", model, adapter), prompt, NUM_TOKENS)
    base = greedy_reference(model, prompt, NUM_TOKENS)
    assert merged != base
    adapted = Adapted(model)
    assert adapted.generate([(prompt, adapted.load(adapter)), (prompt, None)]) == [merged, base]


def test_a_batch_mixes_adapters_of_different_ranks_and_modules_that_take_turns_in_the_slots(
    models: Models, tmp_path: Path
) -> None:
    model = models("qwen3")
    paths = [
        make_adapter(tmp_path / "a", model, rank=1, seed=1),
        make_adapter(tmp_path / "b", model, rank=8, targets=("q_proj", "v_proj"), seed=2),
        make_adapter(tmp_path / "c", model, rank=16, targets=("down_proj", "k_proj", "up_proj"), seed=3),
    ]
    references = [merge(tmp_path / f"merged {path.name}", model, path) for path in paths]
    adapted = Adapted(model, max_loras=2)
    loaded = [*map(adapted.load, paths), None]
    asked = [(make_prompt(3 + 4 * number), loaded[number % 4]) for number in range(5)]
    expected = [
        greedy_reference([*references, model][number % 4], prompt, NUM_TOKENS)
        for number, (prompt, _) in enumerate(asked)
    ]
    assert adapted.generate(asked) == expected
    filled = [slot for plan in adapted.engine.plans for slot, _ in plan.adapters]
    assert set(filled) == {0, 1}
    assert len(filled) >= 3
    # Steps without adapters compute none of their products, behind steps that had some.
    assert adapted.generate([asked[3]]) == [expected[3]]


def test_adapters_work_over_quantized_weights_as_in_the_torch_backend(models: Models, tmp_path: Path) -> None:
    model, prompt = models("llama"), make_prompt(9)
    path = make_adapter(tmp_path, model)
    found = list[list[list[int]]]()
    for backend in ("triton", "torch"):
        adapted = Adapted(model, backend, quantization="ifq")
        found.append(adapted.generate([(prompt, adapted.load(path)), (prompt, None)]))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_steps_with_and_without_adapters_run_in_graphs_of_their_own(models: Models, tmp_path: Path) -> None:
    model, prompt = models("llama"), make_prompt(4)
    adapted = Adapted(model, max_loras=2)
    worker = adapted.engine.worker
    assert isinstance(worker, TritonWorker)
    loaded = [adapted.load(make_adapter(tmp_path / str(seed), model, seed=seed)) for seed in (1, 2)]
    mixed: list[tuple[list[int], LoadedAdapter | None]] = [(prompt, loaded[0]), (prompt, None), (prompt, loaded[1])]
    eager = [adapted.generate(mixed), adapted.generate([(prompt, None)])]
    recomputed = Recomputed()
    with torch.inference_mode():
        worker._graphs = worker._capture(graphs_of(worker, num_tokens=12, num_slots=2), recomputed)
    # A mixed graph without and with adapters, then the decode graphs without, and those with.
    decodes = (recomputed.num_captured - 2) // 2
    plain = {0, *range(2, 2 + decodes)}
    assert adapted.generate(mixed) == eager[0]
    assert 1 in recomputed.replayed
    assert not plain & set(recomputed.replayed)
    recomputed.replayed.clear()
    assert adapted.generate([(prompt, None)]) == eager[1]
    assert 0 in recomputed.replayed
    assert set(recomputed.replayed) <= plain
    assert len({tuple(tokens) for tokens in eager[0]}) == 3
