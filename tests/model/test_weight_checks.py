"""The weights that an engine checks in memory stay as they are while it serves, and cover what the canary may miss."""

import ctypes

import pytest

from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams

SMALL = {"kv_cache_memory_gb": 0.02, "swap_space": 0.0, "max_num_seqs": 4, "threads": 1, "weight_cache": "off"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu_backend": "torch"},
        {"cpu_backend": "torch", "quantization": "ifq"},
        {"cpu_backend": "torch", "quantization": "ifq_nf4", "dtype": "float32"},
        {"cpu_backend": "torch", "enable_lora": True},
        {"quantization": "ifq"},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "native",
)
def test_serving_changes_no_weight_and_a_changed_weight_is_found(options: dict[str, object]) -> None:
    faults: list[str] = []
    engine = Engine.build(EngineSettings(**SMALL, **options), lambda report: None, on_fault=faults.append)  # type: ignore[arg-type]
    try:
        for number in range(6):
            params = SamplingParams(max_tokens=12, temperature=number % 2, ignore_eos=True, logprobs=number % 3)
            engine.add(
                SequenceSpec(sequence_id=f"r{number}", prompt_token_ids=tuple(range(1, 20 + number)), params=params)
            )
        assert engine.canary is not None
        assert engine.guard is not None
        tested = engine.canary.run_now()
        while engine.has_work:
            engine.step()
        assert tested.result(60) == ""
        assert engine.guard.run_now().result(60) == ""
        weights = engine._executor.weight_memory()
        assert sum(one.num_bytes for one in weights) > 2**20
        memory = max(weights, key=lambda one: one.num_bytes)
        cell = ctypes.c_uint8.from_address(memory.address + memory.num_bytes // 2)
        cell.value ^= 1
        assert memory.name in engine.guard.run_now().result(60)
        cell.value ^= 1
        assert faults[0].startswith("the weights have changed in memory")
    finally:
        engine.close()
