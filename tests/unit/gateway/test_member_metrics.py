"""What the heartbeats of all services say in metrics, and the histograms that engines count."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.ops.metrics.engines import EngineCollector
from antiphon.services.gateway.ops.metrics.members import MemberCollector
from antiphon.shared.messages import EngineCounters, EngineHistograms, GatewayStatus, PoolStatus, StreamStatus
from antiphon.shared.observability.histograms import REQUEST_SECONDS, STEP_TOKENS, Histogram
from tests.support.heartbeats import heartbeat
from tests.unit.gateway.test_metrics import ENGINE, beat, samples


def test_every_process_shows_with_its_messages_and_its_load():
    members = [
        (
            heartbeat(
                "gateway",
                "g",
                "b",
                GatewayStatus(num_requests=3, num_waiting=2),
                interval_s=0.3,
                messages_received=10,
                messages_sent=20,
            ),
            0.2,
        ),
        (
            heartbeat(
                "detokenizer",
                "d",
                "b",
                StreamStatus(4, 9, 1, "toy"),
                state="draining",
                messages_received=30,
                messages_sent=40,
            ),
            0.1,
        ),
        (
            heartbeat(
                "tokenizer",
                "t",
                "b",
                PoolStatus(num_requests=5, num_tokens=600, model="toy"),
                interval_s=0.6,
                messages_received=50,
                messages_sent=60,
            ),
            0.5,
        ),
    ]
    seen = samples(GatewayMetrics(MemberCollector(lambda: members)))
    assert seen["antiphon:heartbeat_age_seconds{id=g,service=gateway}"] == 0.2
    assert seen["antiphon:service_ready{id=d,service=detokenizer}"] == 0
    assert seen["antiphon:service_ready{id=t,service=tokenizer}"] == 1
    assert seen["antiphon:bus_messages_received_total{id=g,service=gateway}"] == 10
    assert seen["antiphon:bus_messages_sent_total{id=t,service=tokenizer}"] == 60
    assert (seen["antiphon:gateway_requests{id=g}"], seen["antiphon:gateway_waiting_sequences{id=g}"]) == (3, 2)
    assert seen["antiphon:detokenizer_streams{id=d,model_name=toy}"] == 4
    assert seen["antiphon:detokenizer_resends_total{id=d,model_name=toy}"] == 1
    assert seen["antiphon:tokenizer_tokens_total{id=t,model_name=toy}"] == 600


def test_a_histogram_of_an_engine_keeps_its_bounds_counts_and_sum():
    tokens, seconds = Histogram(STEP_TOKENS), Histogram(REQUEST_SECONDS)
    for value in (1, 8, 9, 99999):
        tokens.observe(value)
    seconds.observe(0.4)
    status = msgspec.structs.replace(
        ENGINE,
        histograms=EngineHistograms(step_tokens=tokens.counts(), queue_s=seconds.counts()),
        counters=EngineCounters(accepted_by_position=(5, 3), drafts=7),
    )
    metrics = GatewayMetrics(EngineCollector(lambda: [beat("e0", status)]))
    families = {one.name: one for one in text_string_to_metric_families(metrics.render().decode())}
    found = {one.labels.get("le", one.name): one.value for one in families["vllm:iteration_tokens_total"].samples}
    assert (found["1.0"], found["8.0"], found["16.0"], found["16384.0"], found["+Inf"]) == (1, 2, 3, 3, 4)
    assert found["vllm:iteration_tokens_total_sum"] == 1 + 8 + 9 + 99999
    seen = samples(metrics)
    assert seen["vllm:request_queue_time_seconds_sum{engine=e0,model_name=toy}"] == 0.4
    assert seen["vllm:request_decode_time_seconds_count{engine=e0,model_name=toy}"] == 0
    assert seen["vllm:spec_decode_num_drafts_total{engine=e0,model_name=toy}"] == 7
    assert seen["vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=e0,model_name=toy,position=1}"] == 3
    assert seen["vllm:num_requests_waiting_by_reason{engine=e0,model_name=toy,reason=capacity}"] == 2


def test_a_request_refused_for_lack_of_capacity_counts_as_rejected():
    metrics = GatewayMetrics()
    for code in ("server_is_overloaded", "rate_limit_exceeded", "invalid_value"):
        metrics.count_error(code)
    seen = samples(metrics)
    assert seen["vllm:admission_rejections_total{reason=server_is_overloaded}"] == 1
    assert seen["vllm:admission_rejections_total{reason=rate_limit_exceeded}"] == 1
    assert "vllm:admission_rejections_total{reason=invalid_value}" not in seen
