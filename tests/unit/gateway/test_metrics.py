import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.request_meter import RequestMeter
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.ops.metrics.engines import EngineCollector
from antiphon.shared.messages import EngineStatus, GatewayStatus, Heartbeat, ServiceState
from tests.support.heartbeats import engine_status, heartbeat
from tests.unit.gateway.request_contexts import context, update

ENGINE = engine_status(
    num_free_blocks=75,
    num_running=3,
    num_waiting=2,
    num_waiting_tokens=40,
    step=9,
    prompt_tokens=70,
    generation_tokens=80,
    prefix_cache_queries=60,
    prefix_cache_hits=50,
    preemptions=1,
    finished=(("stop", 4), ("length", 5)),
    cached_tokens=48,
    swapped_out_blocks=12,
    swapped_in_blocks=11,
    drafted_tokens=90,
    accepted_tokens=66,
)


def beat(engine: str, status: EngineStatus | GatewayStatus, state: ServiceState = "ready") -> Heartbeat:
    service = "engine" if isinstance(status, EngineStatus) else "gateway"
    return heartbeat(service, engine, "b", status, state=state)


def samples(metrics: GatewayMetrics) -> dict[str, float]:
    """Every sample as `name{label=value,…}`, buckets left out."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                key = f"{sample.name}{{{labels}}}"
                assert key not in found
                found[key] = sample.value
    return found


def test_engines_show_under_vllm_s_names():
    beats = [beat("e0", ENGINE), beat("e1", engine_status(num_blocks=0)), beat("g", GatewayStatus())]
    seen = samples(GatewayMetrics(EngineCollector(lambda: beats)))
    e0, e1 = "{engine=e0,model_name=toy}", "{engine=e1,model_name=toy}"
    assert seen[f"vllm:num_requests_running{e0}"] == 3
    assert seen[f"vllm:num_requests_waiting{e0}"] == 2
    assert seen[f"vllm:kv_cache_usage_perc{e0}"] == 0.25
    assert seen[f"vllm:kv_cache_usage_perc{e1}"] == 0
    assert seen[f"vllm:prefix_cache_queries_total{e0}"] == 60
    assert seen[f"vllm:prefix_cache_hits_total{e0}"] == 50
    assert seen[f"vllm:num_preemptions_total{e0}"] == 1
    assert seen[f"antiphon:engine_generation_tokens_total{e0}"] == 80
    assert seen[f"vllm:spec_decode_num_draft_tokens_total{e0}"] == 90
    assert seen[f"vllm:spec_decode_num_accepted_tokens_total{e0}"] == 66
    assert seen[f"antiphon:engine_cached_tokens_total{e0}"] == 48
    assert seen[f"antiphon:engine_swapped_out_blocks_total{e0}"] == 12
    assert seen[f"antiphon:engine_swapped_in_blocks_total{e0}"] == 11
    assert seen["antiphon:engine_sequences_finished_total{engine=e0,finished_reason=stop,model_name=toy}"] == 4
    assert seen["vllm:cache_config_info{block_size=16,engine=e0,model_name=toy,num_gpu_blocks=100}"] == 1
    assert not any("engine=g" in name for name in seen)


def test_an_engine_whose_computing_stands_still_shows():
    seen = samples(GatewayMetrics(EngineCollector(lambda: [beat("e0", ENGINE), beat("e1", ENGINE, "stalled")])))
    assert seen["antiphon:engine_stalled{engine=e0,model_name=toy}"] == 0
    assert seen["antiphon:engine_stalled{engine=e1,model_name=toy}"] == 1


def test_a_request_is_measured_from_its_arrival():
    metrics, one = GatewayMetrics(), context(n=2)
    meter, accumulator = RequestMeter(metrics, one), ChoiceAccumulator(1, 2)
    for item in (
        update("", 0, token_ids=()),
        update("a", 0),
        update("b", 0),
        update("c", 1, num_cached_tokens=9),
        update("d", 0),
    ):
        accumulator.choices[item.index].add(item)
        meter.saw(item)
    accumulator.choices[0].add(update("", 0, token_ids=(), finish_reason="stop", num_cached_tokens=2))
    meter.completed(accumulator, 7)
    meter.ended(accumulator, "abort")
    seen = samples(metrics)
    model = "{model_name=toy}"
    assert seen[f"vllm:time_to_first_token_seconds_count{model}"] == 1
    assert seen[f"vllm:time_to_first_token_seconds_sum{model}"] > 0
    assert seen[f"vllm:inter_token_latency_seconds_count{model}"] == 2
    assert seen[f"vllm:request_time_per_output_token_seconds_count{model}"] == 1
    assert seen[f"vllm:e2e_request_latency_seconds_count{model}"] == 1
    assert seen[f"vllm:prompt_tokens_total{model}"] == 7
    assert seen[f"vllm:prompt_tokens_cached_total{model}"] == 2
    assert seen[f"vllm:generation_tokens_total{model}"] == 4
    assert seen[f"vllm:request_params_n_sum{model}"] == 2
    assert seen["vllm:request_success_total{finished_reason=stop,model_name=toy}"] == 1
    assert seen["vllm:request_success_total{finished_reason=abort,model_name=toy}"] == 1


@pytest.mark.parametrize(
    ("name", "first", "last"), [("time_to_first_token", "0.001", "2560.0"), ("inter_token_latency", "0.01", "80.0")]
)
def test_buckets_are_vllm_s(name: str, first: str, last: str):
    metrics = GatewayMetrics()
    RequestMeter(metrics, context()).saw(update("a"))
    text = metrics.render().decode()
    bounds = [
        line.split('le="')[1].split('"')[0]
        for line in text.splitlines()
        if line.startswith(f"vllm:{name}_seconds_bucket")
    ]
    assert (bounds[0], bounds[-2]) == (first, last)
