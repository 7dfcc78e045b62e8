"""LoRA adapters: equal to transformers with the merged weights, token for token, alone and mixed in one batch."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.worker.interface import AdapterWorker
from antiphon.shared.blocks import adapter_salt
from antiphon.shared.parameters.sampling import SamplingParams
from tests.adapters import LLAMA_TARGETS, make_adapter, merge
from tests.model.harness import NUM_TOKENS, Engine, Models, greedy, make_prompt
from tests.models import greedy_reference

pytestmark = pytest.mark.model
TARGETS = {
    "llama": LLAMA_TARGETS,
    "llama with biases": LLAMA_TARGETS,
    "qwen3": LLAMA_TARGETS,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gemma2": LLAMA_TARGETS,
    "qwen3 with experts": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "falcon_h1": LLAMA_TARGETS,
    "nemotron_h": ("q_proj", "o_proj", "up_proj", "down_proj"),
}
BACKENDS = ("torch", "native")
LIMITS = CoreLimits(max_num_seqs=8, max_num_batched_tokens=256, max_loras=4)


class Adapted:
    """An engine with adapters, and what its sequences gave."""

    def __init__(self, model: Path, limits: CoreLimits = LIMITS, backend: str = "torch", **overrides: object) -> None:
        options = {"enable_lora": True, "max_loras": limits.max_loras, "max_cpu_loras": 8, **overrides}
        self.engine = Engine(model, limits, backend, **options)
        assert isinstance(self.engine.worker, AdapterWorker)
        found = self.engine.worker.adapters
        assert found is not None
        self.library = found

    def load(self, path: Path) -> LoadedAdapter:
        return self.library.load(path.name, str(path))

    def generate(
        self, asked: Sequence[tuple[list[int], LoadedAdapter | None]], num: int = NUM_TOKENS
    ) -> list[list[int]]:
        core, output = self.engine.core, dict[str, list[int]]()
        for number, (prompt, adapter) in enumerate(asked):
            name = f"{len(self.engine.plans)}-{number}"
            salt = b"" if adapter is None else adapter_salt(b"", adapter.version)
            core.add(
                SequenceSpec(
                    sequence_id=name,
                    prompt_token_ids=tuple(prompt),
                    params=greedy(num),
                    cache_salt=salt,
                    adapter=adapter,
                )
            )
            output[name] = []
        while any(name in core for name in output):
            for outcome in self.engine.step():
                output[outcome.sequence_id] += outcome.token_ids
                self.engine.cached[outcome.sequence_id] = outcome.num_cached_tokens
        return list(output.values())


@pytest.mark.parametrize("variant", TARGETS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_adapter_gives_the_tokens_of_the_merged_weights(
    backend: str, variant: str, models: Models, tmp_path: Path
) -> None:
    model = models(variant)
    adapter = make_adapter(tmp_path / "a", model, targets=TARGETS[variant])
    merged = merge(tmp_path / "merged", model, adapter)
    adapted, prompt = Adapted(model, backend=backend), make_prompt(21)
    expected = greedy_reference(merged, prompt, NUM_TOKENS)
    base = greedy_reference(model, prompt, NUM_TOKENS)
    assert expected != base
    loaded = adapted.load(adapter)
    assert adapted.generate([(prompt, loaded), (prompt, None)]) == [expected, base]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_mixes_adapters_and_each_row_is_the_same_as_alone(backend: str, models: Models, tmp_path: Path) -> None:
    model = models("qwen3")
    paths = [
        make_adapter(tmp_path / "a", model, rank=1, seed=1),
        make_adapter(tmp_path / "b", model, rank=8, targets=("q_proj", "v_proj"), seed=2),
        make_adapter(tmp_path / "c", model, rank=16, targets=("down_proj", "k_proj", "up_proj"), seed=3),
    ]
    references = [merge(tmp_path / f"merged {path.name}", model, path) for path in paths]
    adapted = Adapted(model, backend=backend)
    loaded = [*map(adapted.load, paths), None]
    # Different prompts and lengths; every adapter is beside every other one, in prompts and in decode steps.
    asked = [(make_prompt(9 + 5 * number), loaded[number % 4]) for number in range(8)]
    expected = [
        greedy_reference([*references, model][number % 4], prompt, NUM_TOKENS)
        for number, (prompt, _) in enumerate(asked)
    ]
    assert adapted.generate(asked) == expected
    assert max(len(plan.scheduled) for plan in adapted.engine.plans) == 8
    assert adapted.generate(asked[:1]) == expected[:1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_adapter_s_cached_blocks_do_not_answer_another_s_request(
    backend: str, models: Models, tmp_path: Path
) -> None:
    model, prompt = models("llama"), make_prompt(40)
    paths = [make_adapter(tmp_path / str(seed), model, seed=seed) for seed in (1, 2)]
    expected = [greedy_reference(merge(tmp_path / f"m{path.name}", model, path), prompt, 8) for path in paths]
    adapted = Adapted(model, backend=backend)
    first, second = map(adapted.load, paths)
    cached = list[int]()
    for adapter in (first, second, None, first, second):
        output = adapted.generate([(prompt, adapter)], 8)
        cached.append(list(adapted.engine.cached.values())[-1])
        assert adapter is None or output == [expected[adapter is second]]
    assert cached == [0, 0, 0, 32, 32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_adapters_than_slots_take_turns_and_preempted_sequences_keep_theirs(
    backend: str, models: Models, tmp_path: Path
) -> None:
    model = models("llama")
    paths = [make_adapter(tmp_path / str(seed), model, seed=seed, strength=0.7) for seed in range(5)]
    prompts = [make_prompt(20 + number) for number in range(10)]
    merged = [merge(tmp_path / f"m{path.name}", model, path) for path in paths]
    expected = [greedy_reference(merged[number // 2], prompt, NUM_TOKENS) for number, prompt in enumerate(prompts)]
    limits = CoreLimits(max_num_seqs=8, max_num_batched_tokens=64, max_loras=2)
    # Blocks for about three sequences, and room for two of the five adapters in memory.
    adapted = Adapted(model, limits, backend, num_gpu_blocks_override=9, max_cpu_loras=2)
    asked = [(prompt, adapted.load(paths[number // 2])) for number, prompt in enumerate(prompts)]
    assert adapted.generate(asked) == expected
    assert adapted.engine.core.counters().preemptions > 0
    slots = [slot for plan in adapted.engine.plans for slot, _ in plan.adapters]
    assert set(slots) == {0, 1}
    assert len(slots) >= 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_s_numbers_are_the_same_to_the_last_bit_whatever_is_beside_it(
    dtype: str, models: Models, tmp_path: Path
) -> None:
    """In the C++ backend: with and without an adapter, alone and in a batch of other adapters, in prompts and after."""
    model = models("llama")
    paths = [make_adapter(tmp_path / str(seed), model, seed=seed, rank=3 * seed) for seed in (1, 2, 3)]
    adapted = Adapted(model, backend="native", dtype=dtype, enable_prefix_caching=False)
    loaded = [*map(adapted.load, paths), None]
    prompts = [make_prompt(30 + number) for number in range(8)]

    def numbers(asked: list[int]) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {number: [] for number in asked}
        for number in asked:
            adapter = loaded[number % 4]
            salt = b"" if adapter is None else adapter_salt(b"%d" % len(adapted.engine.plans), adapter.version)
            params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=5, ignore_eos=True)
            spec = SequenceSpec(
                sequence_id=str(number),
                prompt_token_ids=tuple(prompts[number]),
                params=params,
                cache_salt=salt,
                adapter=adapter,
            )
            adapted.engine.core.add(spec)
        while adapted.engine.core.sequences:
            for outcome in adapted.engine.step():
                for entry in outcome.logprobs:
                    found[int(outcome.sequence_id)] += [entry.logprob, *entry.top_logprobs]
        return found

    together = numbers(list(range(8)))
    for number in (0, 1, 3):
        assert numbers([number])[number] == together[number]


def test_adapters_work_over_quantized_weights_alike_in_both_backends(models: Models, tmp_path: Path) -> None:
    model, prompt = models("llama"), make_prompt(20)
    path = make_adapter(tmp_path, model)
    found: list[list[list[int]]] = []
    for backend in BACKENDS:
        adapted = Adapted(model, backend=backend, quantization="ifq")
        found.append(adapted.generate([(prompt, adapted.load(path)), (prompt, None)]))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
