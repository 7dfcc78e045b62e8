"""Models whose layers have different heads: their blocks travel; what they are not served with."""

import itertools

import pytest
import torch

from antiphon.services.engine.backends.load import load_worker, triton_cannot_serve
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import work_kinds
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.worker.capacity.kv_cache import bytes_per_block
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.flags import SettingsError
from tests.model.harness import Engine, Models, greedy, make_prompt, settings
from tests.support.ranks import RankThreads
from tests.support.slow import slow_but
from tests.unit.engine.kv.engines import PROMPT, run, started

pytestmark = pytest.mark.model


def test_adapters_are_refused(models: Models) -> None:
    with pytest.raises(SettingsError, match="--enable-lora: the layers of this model have different heads"):
        load_worker(settings(models("laguna"), enable_lora=True, max_loras=1))


TRITON_VARIANTS = ("laguna", "gemma3n", "gemma4", "gemma4 with layers that share keys", "gemma4 with experts")


@pytest.mark.parametrize("variant", slow_but(["gemma4"], TRITON_VARIANTS))
def test_triton_computes_them_in_chunks_mixed_batches_and_after_a_prefix_hit(variant: str, models: Models) -> None:
    """A window is shorter than the prompt; a sequence decodes while the chunks of another one are computed."""
    assert triton_cannot_serve(settings(models(variant)), models(variant)) is None
    limits, shared = CoreLimits(max_num_seqs=4, max_num_batched_tokens=18), make_prompt(18)
    prompts, answers = [make_prompt(3), shared + make_prompt(24, seed=1)], list[list[list[int]]]()
    for backend in ("torch", "triton"):
        engine = Engine(models(variant), limits, backend)
        engine.generate([shared], greedy(1))
        answers.append(engine.generate(prompts, greedy(4)))
        assert max(engine.cached.values()) == 16
        assert any({share.num_tokens == 1 for share in plan.scheduled} == {True, False} for plan in engine.plans)
    assert answers[0] == answers[1]


def test_triton_makes_work_lists_for_each_window_and_heads(models: Models) -> None:
    kinds = work_kinds(describe_model(models("gemma4 with layers that share keys")), 4, 4)
    assert list(kinds.values()) == [{0: [0, 1, 2, 4, 5, 6]}, {0: [3, 7]}]
    assert [(window, heads.group, heads.head_dim) for window, heads in kinds] == [(20, 4, 16), (None, 4, 32)]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_of_threads")
def test_ranks_divide_them_with_tritons_kernels(models: Models) -> None:
    directory = models("gemma4 with layers that share keys")
    limits, prompts = CoreLimits(max_num_seqs=2, max_num_batched_tokens=24), [make_prompt(5), make_prompt(30)]
    chosen = settings(directory, max_num_seqs=2)
    ranks = RankThreads(lambda ranks: TritonWorker(chosen, directory, torch.device("cpu"), ranks), 2, 1)
    ours = Engine.around(ranks, limits).generate(prompts, greedy(3))
    assert ours == Engine(directory, limits, "torch").generate(prompts, greedy(3))


@pytest.mark.parametrize(("sender", "receiver"), list(itertools.product(("cpp", "torch"), repeat=2)))
@pytest.mark.parametrize("variant", ["gemma3n", "gemma4", "gemma4 with layers that share keys"])
def test_blocks_go_from_one_backend_to_another(variant: str, sender: str, receiver: str, models: Models) -> None:
    """Narrow layers share a tensor of the cache, in which each backend has an order of its own.

    If blocks behind windows are freed, a block does not tell which heads it has, and only equal orders are exchanged.
    """
    directory, whole = models(variant), variant != "gemma3n" and sender != receiver
    with started(directory, cpu_backend=receiver) as alone:
        alone.add("right", None)
        right = run(alone, until=(alone, "right"))
    with (
        started(directory, "prefill", cpu_backend=sender, disable_hybrid_kv_cache_manager=whole) as prefill,
        started(
            directory,
            "decode",
            cpu_backend=receiver,
            enable_prefix_caching=False,
            disable_hybrid_kv_cache_manager=whole,
        ) as decode,
    ):
        assert (decode.engine.facts.num_windowed_groups > 0) is not whole
        decode.add("moved", prefill.compute_prompt("t"))
        assert run(prefill, decode, until=(decode, "moved")) == right
        assert decode.engine.counters().kv_loaded_tokens > len(PROMPT) // 2


def test_blocks_that_do_not_tell_their_heads_stay_where_they_are(models: Models) -> None:
    directory = models("gemma4")
    with (
        started(directory, "prefill", cpu_backend="cpp") as prefill,
        started(directory, "decode", cpu_backend="torch") as decode,
        started(directory, cpu_backend="torch") as alone,
    ):
        alone.add("right", None)
        right = run(alone, until=(alone, "right"))
        decode.add("moved", prefill.compute_prompt("t"))
        assert run(prefill, decode, until=(decode, "moved")) == right
        assert decode.engine.counters().kv_loaded_tokens == 0


@pytest.mark.parametrize(("sender", "receiver"), slow_but(["triton"], [("triton", "torch"), ("torch", "triton")]))
def test_blocks_go_to_triton_and_from_it(sender: str, receiver: str, models: Models) -> None:
    directory, prompt = models("gemma4 with layers that share keys"), PROMPT[:36]
    with started(directory, cpu_backend="torch") as alone:
        alone.add("right", None, prompt, max_tokens=3)
        right = run(alone, until=(alone, "right"))
    with (
        started(directory, "prefill", cpu_backend=sender) as prefill,
        started(directory, "decode", cpu_backend=receiver, enable_prefix_caching=False) as decode,
    ):
        decode.add("moved", prefill.compute_prompt("t", prompt), prompt, max_tokens=3)
        assert run(prefill, decode, until=(decode, "moved")) == right
        assert decode.engine.counters().kv_loaded_tokens > len(prompt) // 2


def test_a_narrow_layer_takes_no_more_memory_than_it_needs(models: Models) -> None:
    """Two layers with heads of 16 numbers share a tensor as wide as that of a layer with heads of 32."""
    description = describe_model(models("gemma4 with layers that share keys"))
    assert description.slabs == ((0, 1), (2,), (3,))
    assert description.kv_sources == (0, 1, 2, 3, 2, 2, 2, 3)
    assert bytes_per_block(description, 16, torch.float32) == 3 * 2 * 16 * 32 * 4


def test_ranks_exchange_no_blocks_of_them(models: Models) -> None:
    with (
        pytest.raises(SettingsError, match="--role: the layers of this model differ in their heads"),
        started(models("gemma4"), "prefill", tensor_parallel_size=2),
    ):
        pass
    assert not torch.distributed.is_initialized(), "the ranks must end with the engine that could not start"
