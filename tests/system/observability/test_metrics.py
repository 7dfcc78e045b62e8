"""A real scrape of the real system: every metric that applies is there, and moves as it should under a known load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = pytest.mark.system
NUM_REQUESTS, NUM_TOKENS = 3, 12
VLLM = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc prefix_cache_queries
prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source prompt_tokens_cached generation_tokens
request_success request_prompt_tokens request_generation_tokens iteration_tokens_total
request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prefill_kv_computed_tokens cache_config_info spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos admission_rejections
"""
"""The names of vLLM's metrics, without its prefix, that apply to this system."""


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(model)) as started:
        yield started


def scrape(served: Served) -> dict[str, float]:
    """The sum of each sample's values over all labels, by its name."""
    text = fetch(served, "GET", "/metrics").body.decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, 0.0)
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def load(served: Served) -> None:
    for number in range(NUM_REQUESTS):
        prompt = [number + 1] * 5
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        assert fetch(served, "POST", "/v1/completions", body).status == 200


def test_every_name_that_applies_is_there_and_moves_with_a_known_load(served: Served):
    before = scrape(served)
    assert [name for name in VLLM.split() if f"vllm:{name}" not in before] == []
    load(served)
    expected = {
        "prompt_tokens_total": NUM_REQUESTS * 5,
        "prompt_tokens_by_source_total": NUM_REQUESTS * 5,
        "generation_tokens_total": NUM_REQUESTS * NUM_TOKENS,
        "request_success_total": NUM_REQUESTS,
        "request_prompt_tokens_sum": NUM_REQUESTS * 5,
        "request_generation_tokens_sum": NUM_REQUESTS * NUM_TOKENS,
        "request_max_num_generation_tokens_sum": NUM_REQUESTS * NUM_TOKENS,
        "request_params_n_sum": NUM_REQUESTS,
        "request_params_max_tokens_sum": NUM_REQUESTS * NUM_TOKENS,
        "time_to_first_token_seconds_count": NUM_REQUESTS,
        "e2e_request_latency_seconds_count": NUM_REQUESTS,
        "request_time_per_output_token_seconds_count": NUM_REQUESTS,
        "request_queue_time_seconds_count": NUM_REQUESTS,
        "request_inference_time_seconds_count": NUM_REQUESTS,
        "request_prefill_time_seconds_count": NUM_REQUESTS,
        "request_decode_time_seconds_count": NUM_REQUESTS,
        "request_prefill_kv_computed_tokens_count": NUM_REQUESTS,
        "prefix_cache_queries_total": NUM_REQUESTS * 5,
        "admission_rejections_total": 0,
    }

    def changes(after: dict[str, float]) -> dict[str, float]:
        return {name: after.get(f"vllm:{name}", 0.0) - before.get(f"vllm:{name}", 0.0) for name in expected}

    # Some come with the engine's heartbeats.
    wait_until(lambda: changes(scrape(served)) == expected, 60, lambda: f"{changes(scrape(served))} != {expected}")
    after = scrape(served)

    def change(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0.0)

    assert change("iteration_tokens_total_sum") >= NUM_REQUESTS * (5 + NUM_TOKENS - 1)
    times = [change(f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode", "inference")]
    assert all(value > 0 for value in times)
    assert times[1] + times[2] == pytest.approx(times[3], rel=0.01)
    assert times[0] + times[3] <= change("e2e_request_latency_seconds_sum")


def test_every_service_shows_its_traffic(served: Served):
    text = fetch(served, "GET", "/metrics").body.decode()
    wanted = {"gateway", "tokenizer", "engine", "detokenizer"}
    kinds = ("bus_messages_sent", "bus_messages_received", "bus_subscriptions", "service_ready")
    for name in (f"antiphon:{kind}" for kind in kinds):
        [family] = [one for one in text_string_to_metric_families(text) if one.name == name]
        assert {sample.labels["service"] for sample in family.samples} == wanted
        assert all(sample.value > 0 for sample in family.samples)
