"""Two ranks with the kernels for GPUs, under the interpreter: the tokens of one, in graphs, with adapters, in order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.adapters.delta import AdapterWeights, LoadedAdapter
from antiphon.services.engine.adapters.shards import local_adapter
from antiphon.services.engine.backends.triton.graphs import captured_by_all
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.parallel.shard import Shard
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.blocks import adapter_salt
from tests.adapters import make_adapter
from tests.model.harness import Engine, Models, greedy, make_prompt, settings
from tests.model.looped import run
from tests.model.recomputed import Recomputed, graphs_of
from tests.model.test_adapters import TARGETS
from tests.support.ranks import RankThreads, StagedRanks
from tests.support.slow import slow_but

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), pytest.mark.usefixtures("kernels_of_threads")]
CPU = torch.device("cpu")
GREEDY = {"temperature": 0.0}


def two_ranks(directory: Path, kind: type[RankThreads] = RankThreads, **overrides: Any) -> RankThreads:
    usual = {} if overrides.get("deterministic") else {"gpu_kernels": "reference"}
    chosen = settings(directory, **{**usual, **overrides})
    return kind(lambda ranks: TritonWorker(chosen, directory, CPU, ranks), 2, 1)


@pytest.mark.parametrize("variant", slow_but(["qwen3"], ["qwen3", "qwen3 with experts", "qwen3_5"]))
def test_two_ranks_find_the_same_graphs_and_the_tokens_of_one(variant: str, models: Models) -> None:
    directory = models(variant)
    requests = [(make_prompt(length), params) for length, params in ((5, GREEDY), (3, {"seed": 5}), (2, GREEDY))]
    one = TritonWorker(settings(directory, max_num_seqs=4, block_size=16, gpu_kernels="reference"), directory, CPU)
    expected = run(one, requests, 4).tokens
    two = two_ranks(directory, StagedRanks, max_num_seqs=4, block_size=16)
    assert isinstance(two, StagedRanks)
    assert run(two, requests, 4).tokens == expected

    def capture(worker: ModelWorker) -> Recomputed:
        assert isinstance(worker, TritonWorker)
        recomputed = Recomputed()
        with torch.inference_mode():
            together = captured_by_all(worker._ranks, recomputed)
            worker._graphs = worker._capture(graphs_of(worker, usual=8, num_tokens=8), together)
        return recomputed

    graphs = two.on_all(capture)
    assert run(two, requests, 4).tokens == expected
    assert two.most_in_flight == 2
    assert graphs[0].replayed == graphs[1].replayed
    # A mixed graph, and decode graphs for 4, 2 and 1 sequences.
    assert set(graphs[0].replayed) == {0, 1, 2, 3}


@pytest.mark.parametrize("variant", slow_but(["qwen3"], ["qwen3", "gpt_oss"]))
def test_deterministic_ranks_give_a_sequence_the_same_bits_alone_and_beside_others(
    variant: str, models: Models
) -> None:
    directory, prompts = models(variant), [make_prompt(length) for length in (17, 3)]
    ranks = two_ranks(directory, deterministic=True, max_num_seqs=4)
    assert not ranks.facts().variant_because
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, enable_prefix_caching=False)
    together = Engine.around(ranks, limits).log_probabilities(prompts, 2)
    alone = [Engine.around(ranks, limits).log_probabilities([prompt], 2)[0] for prompt in prompts]
    for ours, theirs in zip(together, alone, strict=True):
        # NumPy, with which the interpreter multiplies, has another order at another place of a tile.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", slow_but(["llama with biases"], ["llama with biases", "phi3", "gpt2", "gpt_neox"]))
def test_adapters_are_divided_like_the_matrices(variant: str, models: Models, tmp_path: Path) -> None:
    directory = models(variant)
    path = make_adapter(tmp_path, directory, targets=TARGETS[variant])
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, max_loras=2)
    extra: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
    two = two_ranks(directory, max_num_seqs=4, **extra)
    first, second = (worker.adapters for worker in two.workers if isinstance(worker, TritonWorker))
    assert first is not None
    assert second is not None
    whole = describe_model(directory)

    def share(_: LoadedAdapter, weights: AdapterWeights) -> None:
        second.accept(local_adapter(weights, whole, Shard.of_rank(1, 2, 1)))

    first.share = share
    alone = Engine(directory, limits, "torch", **extra)
    library = getattr(alone.worker, "adapters", None)
    assert library is not None
    expected = adapted(alone, library.load("a", str(path)))
    assert adapted(Engine.around(two, limits), first.load("a", str(path))) == expected
    assert expected[0] != expected[1]


def adapted(engine: Engine, adapter: LoadedAdapter) -> list[list[int]]:
    """The tokens of one prompt with an adapter and, in the same steps, without it."""
    output: dict[str, list[int]] = {"with": [], "without": []}
    for name, used in (("with", adapter), ("without", None)):
        salt = b"" if used is None else adapter_salt(b"", used.version)
        prompt = tuple(make_prompt(9))
        spec = SequenceSpec(sequence_id=name, prompt_token_ids=prompt, params=greedy(4), cache_salt=salt, adapter=used)
        engine.core.add(spec)
    while engine.core.sequences:
        for outcome in engine.step():
            output[outcome.sequence_id] += outcome.token_ids
    return list(output.values())
