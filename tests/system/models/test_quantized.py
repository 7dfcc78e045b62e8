"""Quantization as users reach it: flags, variables and arguments, the demo model's quality, the direct entry point."""

import math
import re

import pytest

from antiphon import LLM, SamplingParams
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from infra.demo_model.evaluate import unseen_stories
from tests.system.served import Served, fetch, until_the_end

RATIOS = {"ifq": 1.01, "ifq_w8a8": 1.01, "ifq_w4a8": 1.06, "ifq_nf4": 1.06}
"""Largest perplexity on unseen stories, times that of the plain weights."""
SIZES = {"ifq": 0.6, "ifq_w8a8": 0.6, "ifq_w4a8": 0.35, "ifq_nf4": 0.35}
"""Largest size of the quantized matrices, times their plain size."""
TOLD = re.compile(r"quantization: (\S+), weights ([\d.]+) MiB instead of ([\d.]+)")
PROMPT = "Once upon a time"


def perplexity(llm: LLM, texts: list[str]) -> float:
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    values = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=True)
        if entry is not None
    ]
    return math.exp(-sum(values) / len(values))


def greedy(llm: LLM) -> str:
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert output.outputs[0].text is not None
    return output.outputs[0].text


@pytest.mark.spec("S-OFF-008", "S-QNT-015", "S-QNT-016")
def test_rounded_weights_cost_little_quality() -> None:
    texts = unseen_stories(40)
    with LLM(model=str(DEMO_DIRECTORY), kv_cache_memory_gb=0.1) as llm:
        plain = perplexity(llm, texts)
    for mode, ratio in RATIOS.items():
        with LLM(model=str(DEMO_DIRECTORY), quantization=mode, kv_cache_memory_gb=0.1) as llm:
            assert perplexity(llm, texts) <= ratio * plain


@pytest.mark.spec("S-OFF-008")
def test_an_argument_that_contradicts_the_model_is_refused() -> None:
    for value in ("awq", "gptq"):
        with pytest.raises(ValueError, match=f"is not a checkpoint prepared with {value}"):
            LLM(model=str(DEMO_DIRECTORY), quantization=value)
    with pytest.raises(ValueError, match="Hopper"):
        LLM(model=str(DEMO_DIRECTORY), quantization="fp8", device="cpu")


@pytest.mark.spec(
    "S-SRV-035", "S-DEP-036b", "S-QNT-015", "S-QNT-016", "S-QNT-019", "S-QNT-020", "S-SRV-034:int8", "S-DEP-039a:int8"
)  # fmt: skip
@pytest.mark.parametrize(
    ("command", "words", "environ", "mode"),
    [
        ("serve", ("-q", "ifq_nf4"), {"QUANTIZATION": "ifq"}, "ifq_nf4"),
        ("serve", ("-q", "ifq_w8a8"), {}, "ifq_w8a8"),
        ("serve", ("-q", "ifq_w4a8"), {}, "ifq_w4a8"),
        ("serve", ("-q", "auto"), {}, "ifq"),
        ("run", (), {"QUANTIZATION": "ifq"}, "ifq"),
        # The variable DS_DTYPE gives the same setting (tests/unit/antiphon/test_entry_points.py).
        ("run", ("--backend=deepspeed", "--ds-dtype=int8"), {}, "ifq"),
    ],
)
def test_every_way_to_ask_for_rounded_weights_gives_the_same_text(
    command: str, words: tuple[str, ...], environ: dict[str, str], mode: str, expected: dict[str, str]
) -> None:
    flags = ("--model", str(DEMO_DIRECTORY), "--device=cpu", *words)
    with until_the_end(Served(*flags, environ=environ, command=("antiphon", command))) as served:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": "default"}
        if command == "serve":
            body["model"] = str(DEMO_DIRECTORY)
        reply = fetch(served, "POST", "/v1/completions", body)
        assert reply.json["choices"][0]["text"] == expected[mode]
        told = TOLD.search(served.output)
        assert told, served.output
        assert told[1] == mode
        assert float(told[2]) <= SIZES[mode] * float(told[3])
        if "auto" in words:
            assert "quantization: auto: ifq" in served.output


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The greedy text of each mode, from the offline API."""
    texts: dict[str, str] = {}
    for mode in RATIOS:
        with LLM(model=str(DEMO_DIRECTORY), quantization=mode, kv_cache_memory_gb=0.1) as llm:
            texts[mode] = greedy(llm)
    return texts


@pytest.mark.spec("S-QNT-019")
def test_auto_is_off_where_nothing_multiplies_quantized_weights() -> None:
    flags = ("--quantization=auto", "--cpu-backend=torch", "--device=cpu")
    with until_the_end(Served(*flags)) as served:
        assert "auto: none, PyTorch's operations do not multiply quantized weights" in served.output


@pytest.mark.spec("S-SRV-035", "S-QNT-015")
def test_the_direct_entry_point_takes_the_example_of_its_source(expected: dict[str, str]) -> None:
    flags = (
        "--model", str(DEMO_DIRECTORY), "--served-model-name", "model", "--trust-remote-code", "--quantization", "ifq",
        "--use-v2-block-manager", "--use-lookahead", "--num-speculative-tokens", "6", "--device=cpu",
    )  # fmt: skip
    command = ("antiphon.entrypoints.openai.api_server",)
    with until_the_end(Served(*flags, command=command)) as served:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": "model"}
        reply = fetch(served, "POST", "/v1/completions", body)
        assert reply.json["choices"][0]["text"] == expected["ifq"]
        assert "quantization: ifq" in served.output
