"""Prompt adapters: equal to transformers with the vectors before the prompt, alone, mixed, preempted and with LoRA."""

from pathlib import Path

import pytest

from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.core.invariants import check
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec, with_adapter
from antiphon.services.engine.worker.interface import AdapterWorker
from antiphon.shared.blocks import adapter_salt
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams
from tests.adapters import make_adapter, make_prompt_adapter, merge, prompted_reference
from tests.model.harness import BACKENDS, Engine, Models, greedy, make_prompt
from tests.models import greedy_reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
NUM = 10
EVERY = (*BACKENDS, pytest.param("triton", marks=pytest.mark.slow))
"""The GPU kernels, under the interpreter, are quick in one test."""


class Prompted:
    """An engine with prompt adapters and LoRA adapters."""

    def __init__(self, model: Path, backend: str, limits: CoreLimits | None = None, **overrides: object) -> None:
        limits = limits or CoreLimits(max_num_seqs=8, max_num_batched_tokens=256, max_loras=2, max_prompt_adapters=3)
        enabled = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "enable_prompt_adapter": True}
        self.engine = Engine(model, limits, backend, **{**enabled, "max_prompt_adapters": 3, **overrides})
        assert isinstance(self.engine.worker, AdapterWorker)
        found = self.engine.worker.adapters
        assert found is not None
        self.library = found

    def load(self, path: Path) -> LoadedAdapter:
        return self.library.load(path.name, str(path))

    def spec(
        self, name: str, prompt: list[int], adapters: tuple[LoadedAdapter, ...], params: SamplingParams
    ) -> SequenceSpec:
        spec, salt = SequenceSpec(sequence_id=name, prompt_token_ids=tuple(prompt), params=params), b""
        for adapter in adapters:
            spec, salt = with_adapter(spec, adapter), adapter_salt(salt, adapter.version)
        return SequenceSpec(
            sequence_id=name,
            prompt_token_ids=tuple(prompt),
            params=params,
            cache_salt=salt,
            adapter=spec.adapter,
            prompt_adapter=spec.prompt_adapter,
        )

    def generate(
        self, asked: list[tuple[list[int], tuple[LoadedAdapter, ...]]], params: SamplingParams | None = None
    ) -> list[list[int]]:
        core, output = self.engine.core, dict[str, list[int]]()
        for number, (prompt, adapters) in enumerate(asked):
            name = f"{len(self.engine.plans)}-{number}"
            core.add(self.spec(name, prompt, adapters, params or greedy(NUM)))
            output[name] = []
        while any(name in core for name in output):
            for outcome in self.engine.step():
                output[outcome.sequence_id] += outcome.token_ids
                self.engine.cached[outcome.sequence_id] = outcome.num_cached_tokens
            check(core)
        return list(output.values())


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("backend", EVERY)
def test_tokens_are_those_behind_the_adapter_s_vectors(
    backend: str, variant: str, models: Models, tmp_path: Path
) -> None:
    model, prompt = models(variant), make_prompt(21)
    paths = [make_prompt_adapter(tmp_path / str(n), model, num_tokens=n, seed=n) for n in (1, 7, 40)]
    engine = Prompted(model, backend)
    loaded = [engine.load(path) for path in paths]
    expected = [prompted_reference(model, path, prompt, NUM) for path in paths]
    base = greedy_reference(model, prompt, NUM)
    assert len({tuple(tokens) for tokens in (*expected, base)}) == 4
    asked = [(prompt, (adapter,)) for adapter in loaded] + [(prompt, ())]
    assert engine.generate(asked) == [*expected, base]
    # From the prefix cache, each under its own salt; the virtual tokens are no prompt tokens.
    assert engine.generate(asked) == [*expected, base]
    assert list(engine.engine.cached.values())[-4:] == [15, 9, 8, 16]


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_prompt_adapter_and_a_lora_adapter_together(backend: str, models: Models, tmp_path: Path) -> None:
    model, prompt = models("llama"), make_prompt(12)
    lora, virtual = make_adapter(tmp_path / "lora", model), make_prompt_adapter(tmp_path / "virtual", model)
    expected = prompted_reference(merge(tmp_path / "merged", model, lora), virtual, prompt, NUM)
    engine = Prompted(model, backend)
    adapters = engine.load(lora), engine.load(virtual)
    assert engine.generate([(prompt, adapters), (prompt, adapters[::-1])]) == [expected, expected]


@pytest.mark.parametrize("backend", EVERY)
def test_preempted_chunked_and_crowded(backend: str, models: Models, tmp_path: Path) -> None:
    model = models("llama")
    paths = [make_prompt_adapter(tmp_path / str(n), model, num_tokens=9, seed=n) for n in range(5)]
    prompts = [make_prompt(14 + number) for number in range(10)]
    expected = [prompted_reference(model, paths[n // 2], prompt, NUM) for n, prompt in enumerate(prompts)]
    limits = CoreLimits(max_num_seqs=8, max_num_batched_tokens=12, max_loras=2, max_prompt_adapters=2)
    engine = Prompted(model, backend, limits, num_gpu_blocks_override=6)
    asked = [(prompt, (engine.load(paths[n // 2]),)) for n, prompt in enumerate(prompts)]
    assert engine.generate(asked) == expected
    assert engine.engine.core.counters().preemptions > 0
    assert engine.engine.core.counters().prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("backend", EVERY)
def test_penalties_count_real_tokens_alone_and_beams_work(backend: str, models: Models, tmp_path: Path) -> None:
    model, prompt = models("llama"), make_prompt(20)
    engine = Prompted(model, backend)
    adapter = engine.load(make_prompt_adapter(tmp_path, model))
    params = SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3)
    assert len(engine.generate([(prompt, (adapter,))], params)[0]) == 8


def test_what_does_not_go_with_virtual_tokens_is_refused(models: Models, tmp_path: Path) -> None:
    model = models("llama")
    engine = Prompted(model, "torch")
    adapter = engine.load(make_prompt_adapter(tmp_path / "a", model, num_tokens=9))
    core = engine.engine.core
    with pytest.raises(ServiceError, match="behind a prompt adapter's virtual tokens"):
        core.add(engine.spec("a", [5, 6], (adapter,), SamplingParams(prompt_logprobs=1)))
    with pytest.raises(ServiceError, match="takes at most"):
        core.add(engine.spec("a", make_prompt(core.checks.max_model_len - 9), (adapter,), greedy(4)))
    with pytest.raises(ServiceError, match="must name the version of each adapter"):
        core.add(SequenceSpec(sequence_id="a", prompt_token_ids=(5,), params=greedy(4), prompt_adapter=adapter))
    for fields, said in (
        ({"num_tokens": 200}, "has 200 virtual tokens, more than --max-prompt-adapter-token=128"),
        ({"peft_type": "PREFIX_TUNING"}, "its peft_type is 'PREFIX_TUNING', not 'LORA'"),
        ({"num_virtual_tokens": 4}, "prompt_embeddings has shape"),
    ):
        path = make_prompt_adapter(tmp_path / said[:12], model, **fields)  # type: ignore[arg-type]
        with pytest.raises(ServiceError, match=said):
            engine.load(path)
