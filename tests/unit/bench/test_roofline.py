"""The floor of a load: bytes and operations counted by hand for a model small enough to do so."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.recurrent_kinds import GatedDelta
from antiphon.services.engine.models.registry import find_family
from bench.harness.loads import Load
from bench.limits_of_machine.roofline import (
    Limits,
    decode_step,
    floor,
    head_weights,
    kv_bytes,
    layer_weights,
    prompt_step,
    token_operations,
    weight_bytes,
)

DEMO = Path(__file__).resolve().parents[3] / "antiphon" / "demo" / "config.json"
SMALL = DecoderDescription(
    family="llama", vocab_size=100, hidden_size=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2,
    intermediate_size=16, max_positions=64, rope=None, dtype="bfloat16", sliding_windows=(None, None, None),
)  # fmt: skip
PER_LAYER = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 16
LOAD = Load("x", clients=2, prompt=4, output=3, requests=5, warmup=0)
ONE = Limits(1.0, 1e18)


def test_the_weights_of_a_layer_are_its_matrices() -> None:
    assert layer_weights(SMALL) == 3 * PER_LAYER
    assert head_weights(SMALL) == 100 * 8
    assert weight_bytes(SMALL) == 2 * (3 * PER_LAYER + 800)


def test_the_demo_models_weights_are_what_its_config_says() -> None:
    config = json.loads(DEMO.read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    matrices = config["num_hidden_layers"] * hidden * (2 * q + 2 * kv + 3 * inner) + config["vocab_size"] * hidden
    assert weight_bytes(find_family(config).describe(config)) == 2 * matrices


def test_float32_weights_are_twice_the_bytes() -> None:
    assert weight_bytes(dataclasses.replace(SMALL, dtype="float32")) == 2 * weight_bytes(SMALL)


def test_an_mlp_without_a_gate_has_two_matrices() -> None:
    plain = dataclasses.replace(SMALL, gated_mlp=False)
    assert layer_weights(SMALL) - layer_weights(plain) == 3 * 8 * 16


def test_a_token_of_a_mixture_passes_its_own_experts_and_the_router() -> None:
    experts = Experts(num_experts=6, num_per_token=2, intermediate_size=5, layers=frozenset({1}), normalise=True)
    mixture = dataclasses.replace(SMALL, experts=experts)
    assert layer_weights(mixture) == 3 * PER_LAYER - 3 * 8 * 16 + 3 * 8 * (2 * 5) + 8 * 6


def test_a_recurrent_layer_has_its_own_matrices_and_a_state_in_place_of_keys_and_values() -> None:
    delta = GatedDelta(
        layers=frozenset({0, 2}), num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=32, kernel_size=3,
        norm_eps=1e-6,
    )  # fmt: skip
    hybrid = dataclasses.replace(SMALL, recurrent=delta)
    mixer = 8 * (4 + 4 + 64 + 64 + 2 * 2) + 64 * 8
    assert layer_weights(hybrid) == PER_LAYER + 2 * (mixer + 3 * 8 * 16)
    assert kv_bytes(hybrid, 10) == 10 * 2 * 4 * 2
    state = 2 * 4 * (2 * 72 + 2 * 4 * 32)
    step = decode_step(hybrid, sequences=3, context=10)
    assert step.bytes == weight_bytes(hybrid) + 3 * (kv_bytes(hybrid, 10) + state)


def test_gates_of_attention_are_a_matrix_too() -> None:
    assert layer_weights(dataclasses.replace(SMALL, attention_gate=True)) == 3 * (PER_LAYER + 8 * 8)


def test_keys_and_values_are_read_for_every_token_in_sight_and_every_layer() -> None:
    assert kv_bytes(SMALL, 10) == 3 * 10 * 2 * 4 * 2
    windowed = dataclasses.replace(SMALL, sliding_windows=(None, 4, None))
    assert kv_bytes(windowed, 10) == (10 + 4 + 10) * 2 * 4 * 2


def test_a_token_multiplies_each_weight_once_and_attends_twice() -> None:
    assert token_operations(SMALL, 10) == 2 * 3 * PER_LAYER + 3 * 10 * (2 * 8 + 2 * 8)


def test_a_prompt_computes_each_token_and_one_output() -> None:
    work = prompt_step(SMALL, sequences=2, prompt=3)
    assert work.operations == 2 * (sum(token_operations(SMALL, seen) for seen in (1, 2, 3)) + 2 * 800)
    assert work.bytes == weight_bytes(SMALL)


def test_a_cached_prefix_is_attended_to_but_not_computed() -> None:
    work = prompt_step(SMALL, sequences=1, prompt=1, cached=6)
    assert work.operations == token_operations(SMALL, 7) + 2 * 800
    assert work.bytes == weight_bytes(SMALL) + kv_bytes(SMALL, 6)


def test_a_shared_prefix_is_read_once_in_a_step() -> None:
    apart = decode_step(SMALL, sequences=4, context=10)
    together = decode_step(SMALL, sequences=4, context=10, shared=7)
    assert apart.bytes - together.bytes == 3 * kv_bytes(SMALL, 7)
    assert apart.operations == together.operations


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    work = decode_step(SMALL, sequences=2, context=5)
    assert work.seconds(Limits(1.0, 1e18)) == work.bytes
    assert work.seconds(Limits(1e18, 1.0)) == work.operations


def test_a_load_is_waves_of_a_prompt_step_and_a_step_for_each_further_token() -> None:
    result = floor(SMALL, LOAD, ONE)
    pairs = sum(decode_step(SMALL, 2, context).bytes for context in (5, 6))
    last = sum(decode_step(SMALL, 1, context).bytes for context in (5, 6))
    assert result.prompts_s == 3 * weight_bytes(SMALL)
    assert result.decode_s == 2 * pairs + last
    assert result.total_s == result.prompts_s + result.decode_s


@settings(max_examples=60)
@given(
    st.builds(
        Load, name=st.just("x"), clients=st.integers(1, 9), prompt=st.integers(1, 40), output=st.integers(1, 9),
        requests=st.integers(1, 20), warmup=st.just(0), shared=st.integers(0, 40),
    ),
    st.floats(1e3, 1e9), st.floats(1e3, 1e9),
)  # fmt: skip
def test_the_floor_never_rises_with_a_faster_machine_or_more_clients(load: Load, read: float, rate: float) -> None:
    here = floor(SMALL, load, Limits(read, rate)).total_s
    assert floor(SMALL, load, Limits(2 * read, rate)).total_s <= here
    assert floor(SMALL, load, Limits(read, 2 * rate)).total_s <= here
    assert floor(SMALL, load, Limits(2 * read, 2 * rate)).total_s == pytest.approx(here / 2)
    wider = dataclasses.replace(load, clients=load.requests)
    if load.requests % load.clients == 0:
        assert floor(SMALL, wider, Limits(read, rate)).total_s <= here * (1 + 1e-9)
