"""The offline API on a real model, and beside a server with the same model: both give the same answer, to the token."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon import LLM, LoRARequest, PromptAdapterRequest, RequestOutput, SamplingParams
from antiphon.services.engine.core.plan import StepPlan, StepResult
from tests.system.offline import FLAGS, GREEDY, LONG, PROMPTS, generate
from tests.system.served import Served, fetch, until_the_end

ARGUMENTS = """
    model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype quantization
    revision tokenizer_revision seed gpu_memory_utilization swap_space cpu_offload_gb enforce_eager
    max_context_len_to_capture max_seq_len_to_capture disable_custom_all_reduce disable_async_output_proc kwargs
"""


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    with until_the_end(Served(f"--model={model}", "--served-model-name=tiny", *flags)) as started:
        yield started


@pytest.mark.spec(
    "S-OFF-001", "S-OFF-002", "S-OFF-003", "S-OFF-004", "S-OFF-005", "S-OFF-007", "S-OFF-009", "S-OFF-010",
    "S-OFF-012", "S-OFF-013", "S-OFF-014", "S-OFF-015", "S-OFF-017", "S-OFF-019",
)  # fmt: skip
def test_the_constructor_has_the_arguments_in_their_order_with_their_defaults() -> None:
    parameters = inspect.signature(LLM.__init__).parameters
    assert list(parameters)[1:] == ARGUMENTS.split()
    defaults = {name: parameters[name].default for name in ARGUMENTS.split()[1:-1]}
    assert defaults == {
        "tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": False,
        "tensor_parallel_size": 1, "dtype": "auto", "quantization": None, "revision": None,
        "tokenizer_revision": None, "seed": 0, "gpu_memory_utilization": 0.9, "swap_space": 4, "cpu_offload_gb": 0,
        "enforce_eager": None, "max_context_len_to_capture": None, "max_seq_len_to_capture": 8192,
        "disable_custom_all_reduce": False, "disable_async_output_proc": False,
    }  # fmt: skip
    assert parameters["model"].default is inspect.Parameter.empty


@pytest.mark.spec("S-OFF-029", "S-OFF-036")
def test_results_come_in_the_order_of_the_prompts_in_every_form_of_a_prompt(llm: LLM) -> None:
    results = generate(llm, PROMPTS, GREEDY)
    assert [one.prompt for one in results] == PROMPTS
    assert all(one.finished and one.error_code is None and one.error_msg is None for one in results)
    ids = [one.prompt_token_ids for one in results]
    tokens = [one.outputs[0].token_ids for one in results]
    structured = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids[1]}]
    for form in (structured, [{"prompt_token_ids": one} for one in ids]):
        assert [one.outputs[0].token_ids for one in generate(llm, form, GREEDY)] == tokens
    assert generate(llm, PROMPTS[0], GREEDY)[0].outputs[0].token_ids == tokens[0]
    assert generate(llm, inputs=PROMPTS[0], sampling_params=GREEDY)[0].outputs[0].token_ids == tokens[0]


@pytest.mark.spec("S-OFF-031", "S-OFF-037")
def test_token_ids_as_an_argument_work_and_warn_once_a_call(llm: LLM) -> None:
    with pytest.warns(DeprecationWarning, match="'prompt_token_ids' is deprecated"):
        one = generate(llm, prompt_token_ids=[5, 6, 7], sampling_params=GREEDY)
    with pytest.warns(DeprecationWarning, match="'prompt_token_ids'"):
        two = generate(llm, prompt_token_ids=[[5, 6, 7], [8]], sampling_params=GREEDY)
    assert len(one) == 1
    assert two[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    with pytest.raises(ValueError, match="Give prompts"):
        generate(llm)
    with (
        pytest.warns(DeprecationWarning, match="'prompt_token_ids'"),
        pytest.raises(ValueError, match="2 prompts and 1 prompt_token_ids"),
    ):
        generate(llm, PROMPTS, GREEDY, [[1]])


@pytest.mark.spec("S-OFF-023", "S-OFF-030")
def test_sampling_parameters_are_for_all_or_paired(llm: LLM) -> None:
    pair = [SamplingParams(max_tokens=1, ignore_eos=True), SamplingParams(max_tokens=3, ignore_eos=True)]
    assert [len(one.outputs[0].token_ids) for one in generate(llm, PROMPTS, pair)] == [1, 3]
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert [len(one.outputs[0].token_ids) for one in llm.chat(messages, pair, use_tqdm=False)] == [1, 3]
    default = generate(llm, PROMPTS, None)
    assert all(len(one.outputs[0].token_ids) <= 16 for one in default)
    for call in (generate, lambda llm, _, params: llm.chat(messages, params, use_tqdm=False)):
        with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
            call(llm, PROMPTS, [GREEDY])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate("x " * 9999, GREEDY), "maximum context length is 512 tokens"),
        (lambda llm: llm.generate(["a", "x " * 9999], GREEDY), r"prompts\[1\]: This model's maximum context"),
        (lambda llm: llm.generate({"prompt_token_ids": [99999]}, GREEDY), "outside the vocabulary"),
        (lambda llm: llm.generate("", GREEDY), "The prompt has no tokens"),
        (lambda llm: llm.generate("a", GREEDY, lora_request=LoRARequest("a", 1, "a")), "with enable_lora=True"),
        (
            lambda llm: llm.generate("a", GREEDY, prompt_adapter_request=PromptAdapterRequest("a", 1, "a")),
            "with enable_prompt_adapter=True",
        ),
        (lambda llm: llm.generate("a", GREEDY, guided_options_request={}), "Give one of guided_json"),
        (lambda llm: llm.generate("a", GREEDY, guided_options_request={"guided_regex": "(("}), "cannot be used"),
        (lambda llm: llm.generate("a", SamplingParams(logit_bias={10**6: 1})), "outside the vocabulary"),
        (lambda llm: llm.generate("a", inputs="b"), "give one of them"),
        (lambda llm: llm.chat([{"role": "tool", "content": "x"}], GREEDY), "tool_call_id"),
        (lambda llm: llm.chat([{"role": "user", "contents": "x"}], GREEDY), "unknown field: 'contents'"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x"}], GREEDY, tools=[{"type": "function"}]),
            r"tools\[0\].function",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x"}], GREEDY, continue_final_message=True),
            "add_generation_prompt=False",
        ),
        (lambda llm: llm.chat([{"role": "user"}], GREEDY), "content"),
        (lambda llm: llm.chat([], GREEDY), "'messages' must hold between 1 and"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template="{% nope %}"), "not valid"),
    ],
)
def test_a_wrong_call_raises_before_anything_runs(llm: LLM, call: Callable[[LLM], Any], said: str) -> None:
    before = llm._runner.engine.counters().step  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ValueError, match=said):
        call(llm)
    assert llm._runner.engine.counters().step == before  # pyright: ignore[reportPrivateUsage]
    assert not llm._runner.has_work  # pyright: ignore[reportPrivateUsage]


@pytest.mark.spec("S-OFF-022", "S-OFF-026", "S-OFF-027", "S-OFF-028")
def test_a_conversation_is_rendered_by_the_template_and_generated_from(llm: LLM) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}]
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False)
    rendered = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert result.prompt == rendered + "<|im_start|>assistant\n"
    assert generate(llm, {"prompt_token_ids": result.prompt_token_ids}, GREEDY)[0].outputs == result.outputs
    (open_end,) = llm.chat(messages, GREEDY, False, add_generation_prompt=False)
    assert open_end.prompt == rendered
    (own,) = llm.chat(messages, GREEDY, False, chat_template="{{ messages[0].content }}\\n!")
    assert own.prompt == "S\n!"
    (open_turn,) = llm.chat(messages, GREEDY, False, add_generation_prompt=False, continue_final_message=True)
    assert open_turn.prompt == rendered.removesuffix("<|im_end|>\n")
    template = "{{ tools[0].function.name }} {{ mood }} {{ documents[0].title }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    given: Any = {"tools": tools, "documents": [{"title": "T"}], "chat_template_kwargs": {"mood": "good"}}
    (varied,) = llm.chat(messages, GREEDY, False, chat_template=template, **given)
    assert varied.prompt == "f good T"
    several = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert [one.prompt for one in several] == [
        result.prompt,
        result.prompt.replace("<|im_start|>system\nS<|im_end|>\n", ""),
    ]


@pytest.mark.spec("S-OFF-024", "S-OFF-032")
def test_a_progress_bar_is_shown_unless_it_is_switched_off(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert "Processed prompts" in (shown := capfd.readouterr().err)
    assert "2/2" in shown
    llm.chat([{"role": "user", "content": "x"}], GREEDY)
    assert "1/1" in capfd.readouterr().err
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


@pytest.mark.spec("S-OFF-042", "S-OFF-043a", "S-OFF-043b", "S-OFF-044", "S-OFF-045", "S-OFF-048a", "S-OFF-048b",
                  "S-OFF-049", "S-OFF-050", "S-OFF-051")  # fmt: skip
def test_a_result_has_every_field(llm: LLM) -> None:
    empty = RequestOutput(outputs=[])
    assert (empty.request_id, empty.prompt, empty.prompt_token_ids, empty.finished) == ("default", None, None, False)
    assert (empty.num_cached_tokens, empty.metrics, empty.error_code, empty.error_msg) == (0, None, None, None)
    (result,) = generate(llm, "Once", SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, logprobs=2))
    assert result.prompt == "Once"
    assert [one.index for one in result.outputs] == [0, 1, 2]
    for one in result.outputs:
        assert len(one.token_ids) == len(one.logprobs or ()) == 5
        assert one.finish_reason == "length"
        assert isinstance(one.text, str)
        chosen = [one.logprobs[place][token].logprob for place, token in enumerate(one.token_ids)]  # pyright: ignore[reportOptionalSubscript]
        assert one.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)
    assert len({tuple(one.token_ids) for one in result.outputs}) > 1


@pytest.mark.spec("S-OFF-040h", "S-OFF-040i", "S-OFF-040k", "S-OFF-040l")
def test_what_ends_an_output(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (whole,) = generate(llm, LONG, free)
    text, tokens = whole.outputs[0].text, whole.outputs[0].token_ids
    assert text is not None
    stop = text[4:7]
    (stopped,) = generate(llm, LONG, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop]))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    token = tokens[5]
    by_id = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[token])
    (ended,) = generate(llm, LONG, by_id)
    assert ended.outputs[0].token_ids == tokens[: tokens.index(token) + 1]
    assert ended.outputs[0].stop_reason == token
    late = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[token], min_tokens=10)
    assert len(generate(llm, LONG, late)[0].outputs[0].token_ids) >= 10
    assert (
        len(
            generate(llm, LONG, SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))[0].outputs[0].token_ids
        )
        > 200
    )


def test_an_output_ends_at_the_end_tokens_of_its_parameters(llm: LLM) -> None:
    (whole,) = generate(llm, LONG, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    tokens = whole.outputs[0].token_ids
    (ended,) = generate(llm, LONG, SamplingParams(temperature=0, max_tokens=24, eos_token_ids=[tokens[5]]))
    assert ended.outputs[0].token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)


def test_a_prompt_is_truncated_to_its_last_tokens(llm: LLM) -> None:
    (whole,) = generate(llm, LONG, GREEDY)
    assert whole.prompt_token_ids is not None
    (cut,) = generate(llm, LONG, replace(GREEDY, truncate_prompt_tokens=5))
    assert cut.prompt_token_ids == whole.prompt_token_ids[-5:]
    assert cut.outputs == generate(llm, {"prompt_token_ids": cut.prompt_token_ids}, GREEDY)[0].outputs
    (fits,) = generate(llm, "word " * 1000, replace(GREEDY, truncate_prompt_tokens=-1))
    assert fits.prompt_token_ids is not None
    assert len(fits.prompt_token_ids) + 8 == llm._runner.engine.max_model_len  # pyright: ignore[reportPrivateUsage]


def test_an_output_without_text_has_the_same_tokens(llm: LLM) -> None:
    (with_text,), (without,) = (generate(llm, LONG, replace(GREEDY, detokenize=one)) for one in (True, False))
    assert without.outputs[0].text == ""
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids


@pytest.mark.spec("S-OFF-046")
def test_tokens_of_a_known_prefix_come_from_the_cache(model: Path) -> None:
    with LLM(str(model), **FLAGS) as llm:
        assert generate(llm, LONG, GREEDY)[0].num_cached_tokens == 0
        cached = generate(llm, LONG, GREEDY)[0].num_cached_tokens
        assert cached
        assert cached % 8 == 0


@pytest.mark.spec("S-OFF-047", "S-OFF-053", "S-OFF-054", "S-OFF-055", "S-OFF-056", "S-OFF-057", "S-OFF-058",
                  "S-OFF-059", "S-OFF-060")  # fmt: skip
def test_the_times_of_a_request_belong_together(llm: LLM) -> None:
    for result in generate(llm, [LONG, *PROMPTS] * 5, SamplingParams(max_tokens=9, ignore_eos=True)):
        m = result.metrics
        assert m is not None
        assert m.inference_start_time is not None
        assert m.request_start_time is not None
        assert m.arrival_time <= m.request_start_time <= m.inference_start_time + 0.01
        assert m.model_forward_time is not None
        assert m.model_execute_time is not None
        assert 0 < m.model_forward_time <= m.model_execute_time
        assert m.time_in_queue is not None
        assert m.preprocess_cost_time is not None
        assert m.time_in_queue + m.preprocess_cost_time <= m.model_execute_time
        assert m.first_token_time is not None
        assert 0 < m.first_token_time <= m.model_execute_time
        assert m.first_token_latency == m.first_token_time
        assert m.first_token_ts is not None
        assert m.last_token_ts is not None
        assert m.scheduled_ts == m.inference_start_time
        assert m.arrival_time < m.first_token_ts < m.last_token_ts


@pytest.mark.spec("S-OFF-011")
def test_a_seed_of_the_engine_makes_unseeded_requests_repeat(model: Path) -> None:
    def texts(seed: int) -> list[str | None]:
        with LLM(str(model), seed=seed, **FLAGS) as llm:
            return [one.outputs[0].text for one in generate(llm, PROMPTS)]

    assert texts(0) == texts(0) != texts(1)


@pytest.mark.spec("S-OFF-016")
def test_the_former_name_of_the_longest_captured_sequence_is_told_of(model: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match="use 'max_seq_len_to_capture'"),
        LLM(str(model), max_context_len_to_capture=64, **FLAGS) as llm,
    ):
        assert generate(llm, PROMPTS[0], GREEDY)[0].finished


def test_without_a_tokenizer_there_are_token_ids_alone(model: Path) -> None:
    with LLM(str(model), skip_tokenizer_init=True, **FLAGS) as llm:
        (result,) = generate(llm, {"prompt_token_ids": [5, 6, 7]}, GREEDY)
        assert result.outputs[0].text == ""
        assert len(result.outputs[0].token_ids) == 8
        with pytest.raises(ValueError, match="'skip_tokenizer_init'"):
            generate(llm, "text", GREEDY)
        with pytest.raises(ValueError, match="'skip_tokenizer_init'"):
            llm.chat([{"role": "user", "content": "x"}], GREEDY)


def test_without_text_the_tokens_are_the_same(llm: LLM) -> None:
    (silent,) = generate(llm, LONG, SamplingParams(temperature=0, max_tokens=8, detokenize=False))
    (spoken,) = generate(llm, LONG, GREEDY)
    assert silent.outputs[0].text == ""
    assert silent.outputs[0].token_ids == spoken.outputs[0].token_ids


def test_a_model_that_is_not_there_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="/nowhere"):
        LLM("/nowhere")


class BreakingWorker:
    """Raises in its n-th step."""

    def __init__(self, worker: Any, steps: int) -> None:
        self.facts, self.close, self._worker, self._left = worker.facts, worker.close, worker, steps

    def run(self, plan: StepPlan) -> StepResult:
        self._left -= 1
        if not self._left:
            raise RuntimeError("out of luck")
        return self._worker.run(plan)


def test_a_failing_engine_ends_each_result_with_an_error_and_what_was_generated(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from antiphon.services.engine import engine as engine_module

    load = engine_module.load_model
    monkeypatch.setattr(engine_module, "load_model", lambda settings: BreakingWorker(load(settings), 4))
    with LLM(str(model), **FLAGS) as llm:
        results = generate(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for one in results:
            assert (one.finished, one.error_code) == (True, 500)
            assert one.error_msg is not None
            assert "out of luck" in one.error_msg
            assert one.outputs[0].finish_reason == "error"
            assert 1 <= len(one.outputs[0].token_ids) < 8
        with pytest.raises(RuntimeError, match="The engine has failed"):
            generate(llm, PROMPTS, GREEDY)


# --- beside a server --------------------------------------------------------------------------------------------------


def completion(served: Served, **body: Any) -> list[dict[str, Any]]:
    answer = fetch(served, "POST", "/v1/completions", {"model": "tiny", "return_token_ids": True, **body})
    assert answer.status == 200, answer.body
    return answer.json["choices"]


FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12), "seed": st.integers(0, 2**40)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.1, 0.7, 1.0]),
        "top_k": st.sampled_from([-1, 1, 5, 200]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "top_a": st.sampled_from([0.0, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "n": st.integers(1, 3),
        "stop": st.sampled_from(["e", ["the", "a"], " of"]),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.integers(0, 3),
    },
)
PARAMS = FIELDS.filter(lambda p: p.get("n", 1) == 1 or (p.get("temperature", 1.0) > 0 and p.get("top_k", -1) != 1))


@given(prompts=st.lists(st.text("abc the of é好", min_size=1, max_size=40), min_size=1, max_size=4), params=PARAMS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_offline_and_served_answers_are_equal(
    served: Served, llm: LLM, prompts: list[str], params: dict[str, Any]
) -> None:
    offline = [one for result in generate(llm, prompts, SamplingParams(**params)) for one in result.outputs]
    online = completion(served, prompt=prompts, **params)
    assert [one.token_ids for one in offline] == [one["token_ids"] for one in online]
    assert [one.text for one in offline] == [one["text"] for one in online]
    assert [one.finish_reason for one in offline] == [one["finish_reason"] for one in online]
    assert [one.stop_reason for one in offline] == [one["stop_reason"] for one in online]
    if "logprobs" in params:
        ours = [[one.logprobs[i][t].logprob for i, t in enumerate(one.token_ids)] for one in offline]  # pyright: ignore[reportOptionalSubscript]
        assert ours == [pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-4) for one in online]


def test_a_conversation_gets_the_servers_answer(served: Served, llm: LLM) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = fetch(served, "POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text == answer


def test_warnings_are_not_shown_for_a_plain_call(llm: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(llm, PROMPTS, GREEDY)


@pytest.mark.spec("S-API-004", "S-API-038", "S-API-044", "S-API-053")
def test_an_engines_request_is_answered_as_by_the_server(llm: LLM, served: Served) -> None:
    turns = {"system": "Be brief.", "history": [["Hi", "Hello"]], "prompt": "And now?"}
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And now?")]
    messages = [{"role": role, "content": content} for role, content in said]
    bodies: list[dict[str, Any]] = [
        {**turns, "request_id": "a", "arrival_time": 1700000000.5},
        {"messages": messages, "request_id": "b", "eos_token_ids": [1, 2, 3]},
        {"prompt": PROMPTS[0], "request_id": "c"},
        {"prompt_token_ids": [5, 6, 7], "prompt_token_ids_len": 3, "request_id": "1"},
    ]
    sampling = {"temperature": 0, "max_tokens": 8}
    params = SamplingParams(temperature=0, max_tokens=8)
    results = generate(llm, [*bodies, PROMPTS[0]], params)
    assert [one.request_id for one in results[:4]] == ["a", "b", "c", "1"]
    assert len({one.request_id for one in results}) == 5
    assert results[0].metrics is not None
    assert results[0].metrics.arrival_time == 1700000000.5
    assert results[0].prompt_token_ids == results[1].prompt_token_ids
    assert results[4].outputs[0].token_ids == results[2].outputs[0].token_ids
    for body, one in zip(bodies, results, strict=False):
        answer = fetch(served, "POST", "/generate", {**body, "sampling_params": sampling})
        assert answer.status == 200, answer.body
        assert answer.json["prompt_token_ids"] == one.prompt_token_ids
        assert answer.json["outputs"][0]["token_ids"] == one.outputs[0].token_ids
    for wrong in ([bodies[0], bodies[0]], {**turns, "multi_modal_data": {"image": b"x"}}):
        with pytest.raises(ValueError, match=r"'a' is in use|leave 'multi_modal_data' out"):
            generate(llm, wrong, params)
