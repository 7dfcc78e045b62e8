"""Gain and cost of a draft layer (`--use-mtp`): times with and without it, for core and worker alone.

    python -m bench.engine.drafts DIRECTORY [--size 0.8b] [--batches 1 8] [--right 0 0.5 0.8] [--prompt 256]
    python -m bench.engine.drafts DIRECTORY --chats [--batches 1 8] [--tokens 128]

If DIRECTORY has no config.json, a model with the shape of Qwen 3.5 (`--size`) and random weights is written there. It
and its draft layer compute every step in full, but the draft tokens are replaced by ones of which a known share is
right: a first run tells what they have to be. A pair is one run without and one with drafts, in alternating order, each
with the same prompts. With --chats the drafts are those of the layer, and prompts are tasks of the demo model,
for a model that `infra.demo_model.drafts.train` has written.

The output is the median and quartiles of the pairs' ratios of time (above 1: drafts are slower), for the steps with
prompts and the others apart and together; the share of the time that the layer took; the share of accepted drafts; and
how many tokens a step gave each sequence.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, StepPlan, StepResult
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams
from bench.engine.lookahead import noise
from bench.peer_systems.make_models import write_json, write_weights
from infra.demo_model.evaluate import held_out
from infra.demo_model.tokenizer import load, render

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000.0,
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
SIZES: dict[str, dict[str, Any]] = {
    "0.8b": SHAPE,
    "4b": {
        **SHAPE,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
}
WRONG = 1
"""A token that the model does not give."""
CHATS = 48


@dataclass(kw_only=True)
class Work:
    """Prompts, and the tokens that the model gives after them, once they are known."""

    prompts: list[tuple[int, ...]]
    params: SamplingParams
    right: float | None
    """Share of the drafts that is right; None: they are those of the layer."""
    always: bool
    """Whether steps have drafts whatever they cost: the core has no clock."""
    outputs: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


@dataclass(kw_only=True)
class Taken:
    """Seconds of a run: of its steps with prompts, of the others, and of the draft layer in both."""

    prompts_s: float = 0.0
    rest_s: float = 0.0
    layer_s: float = 0.0
    num_steps: int = 0
    """Number of steps in which a sequence got a token, over all sequences."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Times with and without a draft layer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.8b", help="of the model that is written")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--right", type=float, nargs="*", default=[0.0, 0.5, 0.8])
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--always", action="store_true", help="draft in every step, whether it pays or not")
    options = parser.parse_args()
    if not (options.directory / "config.json").is_file():
        options.directory.mkdir(parents=True, exist_ok=True)
        write_json(options.directory / "config.json", SIZES[options.size])
        write_weights(options.directory, SIZES[options.size], drafts=True)
    settings = EngineSettings(
        model=str(options.directory),
        threads=options.threads,
        max_num_seqs=max(options.batches),
        max_model_len=1024,
        kv_cache_memory_gb=4.0,
        device="cpu",
        use_mtp=True,
    )
    worker = load_worker(settings)
    assert worker.facts().has_draft_layer
    titles = f"{'prompts':>22}{'then':>22}{'in all':>22}{'layer':>8}{'accepted':>10}{'a step':>8}{'ms/token':>10}"
    print(f"{'right':>6}{'batch':>6}{titles}")
    for right in [None] if options.chats else options.right:
        for batch in options.batches:
            compare(worker, work_of(options, batch, right), batch, right, options)


def work_of(options: argparse.Namespace, batch: int, right: float | None) -> Work:
    params = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=not options.chats)
    if options.chats:
        tokenizer, samples = load(options.directory), random.Random(1).sample(held_out(3), CHATS)
        prompts = [tuple(tokenizer.encode(render(one.messages, prompt=True)).ids) for one in samples]
        return Work(prompts=prompts, params=params, right=right, always=options.always)
    prompts = [tuple(noise(seed, place) for place in range(-options.prompt, 0)) for seed in range(batch)]
    return Work(prompts=prompts, params=params, right=right, always=options.always)


def compare(worker: ModelWorker, work: Work, batch: int, right: float | None, options: argparse.Namespace) -> None:
    # A core with drafts keeps what it has learnt from pair to pair, as that of an engine does.
    cores = {most: make_core(worker, batch, most) for most in (0, options.most)}
    run(worker, cores[0], work)
    ratios: list[tuple[float, float, float]] = []
    plain_s: list[float] = []
    layer: list[float] = []
    num_steps = 0
    for pair in range(-1, options.pairs):
        runs = {most: run(worker, cores[most], work) for most in sorted(cores, reverse=pair % 2 == 0)}
        plain, own = runs[0], runs[options.most]
        if pair >= 0:
            whole = (own.prompts_s + own.rest_s) / (plain.prompts_s + plain.rest_s)
            ratios.append((own.prompts_s / plain.prompts_s, own.rest_s / plain.rest_s, whole))
            plain_s.append(plain.rest_s)
            num_steps += own.num_steps
            layer.append(own.layer_s / (own.prompts_s + own.rest_s))
    columns = "".join(f"{summary(list(column)):>22}" for column in zip(*ratios, strict=True))
    counters, num_tokens = cores[options.most].counters(), sum(map(len, work.outputs.values()))
    accepted = f"{counters.accepted_tokens / max(1, counters.drafted_tokens):.0%}"
    milliseconds = statistics.median(plain_s) / num_tokens * batch * 1e3
    a_step = num_tokens * options.pairs / num_steps
    rest = f"{statistics.median(layer):>8.1%}{accepted:>10}{a_step:>8.2f}{milliseconds:>10.2f}"
    print(f"{'layer' if right is None else f'{right:.0%}':>6}{batch:>6}{columns}{rest}", flush=True)


def summary(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} {high:.3f})"


def make_core(worker: ModelWorker, batch: int, most: int) -> Core:
    limits = CoreLimits(
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        num_speculative_tokens=most,
        use_lookahead=False,
    )
    return Core(limits, worker.facts())


def run(worker: ModelWorker, core: Core, work: Work) -> Taken:
    """Continues all prompts. Their tokens must be `Work.outputs`, which gets them if it is empty."""
    taken, found = Taken(), {str(number): list[int]() for number in range(len(work.prompts))}
    for number, prompt in enumerate(work.prompts):
        core.add(SequenceSpec(sequence_id=str(number), prompt_token_ids=prompt, params=work.params))
    while core.sequences:
        started_s = time.perf_counter()
        plan = core.schedule(0.0 if work.always else time.monotonic())
        result = with_drafts(core, plan, worker.run(plan), work)
        for outcome in core.apply(plan, result, 0.0 if work.always else time.monotonic()):
            found[outcome.sequence_id] += outcome.token_ids
            taken.num_steps += 1
        spent_s = time.perf_counter() - started_s
        taken.layer_s += result.draft_s
        if plan.new:
            taken.prompts_s += spent_s
        else:
            taken.rest_s += spent_s
    assert not work.outputs or work.outputs == found, "drafts have changed tokens"
    work.outputs.update(found)
    return taken


def with_drafts(core: Core, plan: StepPlan, result: StepResult, work: Work) -> StepResult:
    """The result with draft tokens of which a share is right in place of the predicted ones."""
    if not result.draft_token_ids or work.right is None:
        return result
    samples = [share for share in plan.scheduled if share.samples]
    drafts: list[tuple[int, ...]] = []
    for share, given, predicted in zip(samples, result.token_ids, result.draft_token_ids, strict=True):
        sequence = core.residency.rows[share.row]
        name, position = sequence.sequence_id, sequence.num_output_tokens + len(given)
        truth = work.outputs[name][position : position + len(predicted)]
        luck = (random.Random(f"{name} {position + ahead}").random() < work.right for ahead in range(len(truth)))
        drafts.append(tuple(token if lucky else WRONG for token, lucky in zip(truth, luck, strict=True)))
    return replace(result, draft_token_ids=tuple(drafts))


if __name__ == "__main__":
    main()
