"""The hash of what can change an engine's tokens: it differs where they may, and is the same otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.worker.configuration import configuration_hash
from antiphon.shared.config import EngineSettings


def configuration(directory: Path, **settings: Any) -> str:
    given = {"model": str(directory), "device": "cpu", "block_size": 16, "kv_cache_memory_gb": 0.01, "threads": 1}
    worker = load_worker(EngineSettings(**{**given, "max_num_seqs": 4, **settings}))
    worker.close()
    return worker.facts().configuration


@pytest.mark.spec("S-API-076")
def test_types_and_backends_have_different_configurations(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    different = [
        {"cpu_backend": "torch", "dtype": "float32"},
        {"cpu_backend": "torch", "dtype": "bfloat16"},
        {"cpu_backend": "torch", "dtype": "float32", "kv_cache_dtype": "fp8"},
        {"cpu_backend": "torch", "dtype": "float32", "kv_cache_dtype": "fp8_e5m2"},
        {"cpu_backend": "auto", "dtype": "float32"},
        {"cpu_backend": "auto", "dtype": "float32", "kv_cache_dtype": "fp8"},
        {"cpu_backend": "auto", "dtype": "bfloat16"},
        {"cpu_backend": "triton", "dtype": "float32"},
        {"cpu_backend": "triton", "dtype": "float32", "hf_overrides": '{"rope_theta": 20000.0}'},
    ]
    found = [configuration(directory, **settings) for settings in different]
    assert len(set(found)) == len(different), found
    assert all(len(one) == 16 for one in found)


@pytest.mark.spec("S-API-076")
def test_what_leaves_the_tokens_alone_leaves_the_configuration_alone(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    same = [{}, {"block_size": 32}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}, {"use_warmup": True}]
    assert len({configuration(directory, **settings) for settings in same}) == 1


@pytest.mark.spec("S-API-076")
def test_software_instruction_set_and_model_configuration_are_part_of_it(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from antiphon.services.engine.worker import configuration as module

    def made(backend: str = "cpp avx2-0123") -> str:
        return configuration_hash(directory, backend, torch.float32, torch.float32)

    directory = checkpoint()
    found = [made(), made("cpp amx-0123")]
    monkeypatch.setattr(module, "software_version", lambda: "another release")
    found.append(made())
    config = directory / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"bits": 8},', 1))
    found.append(made())
    assert len(set(found)) == 4
    assert made() == found[-1]
