"""Core, loop and GPU worker in one process, without bus, with a model of the shape of Llama 3.1 8B.

The weights are drawn on the device, so that no file of 16 GB is written, and again for each form of the weights. Each
part has one worker; parts of the same form share it.

    decode          steps at several batch sizes, greedy and with top-p, and a long prefill, beside their floors
    steps           a row with a grammar among 64, a long sequence among 64, a prompt that joins, draft tokens
    profile         the kernels of five steps, and the time in which none runs
    batches         whether the bits of a sequence depend on the size of its batch (recorded)
    forms           the same as decode with quantized weights and an 8-bit cache
    deterministic   the same with `--deterministic`; the bits must not depend on the batch
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.triton.autotune.kept import Kept, measured_with
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.canary.measure import check_deterministic
from antiphon.services.engine.core.plan import CoreLimits, SampledLogprobs
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from bench.gpu.models import LARGE, make
from bench.gpu.parts import DEVICE, Found, Given, compute_parts, synchronize
from bench.gpu.profile import profiled
from bench.gpu.roofs import Rates, Work
from bench.gpu.timing import rounded

DIGITS = Grammar("regex", "[0-9]{2000}")
_TOP = 20
"""Candidates whose log probabilities are compared, bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of sequences and tokens."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    compared: tuple[int, ...] = (1, 7, 8, 9, 64, 256)
    joined: int = 64
    context: int = 1024
    steps: int = 64
    long: int = 9216
    joining: int = 128
    prefill: int = 8192
    drafts: int = 4


TINY = Sizes(batches=(1, 2), compared=(1, 2, 3), joined=3, context=9, steps=6, long=30, joining=5, prefill=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the weights and the KV cache are stored, and whether bits must not depend on the batch."""

    quantization: str = ""
    kv_cache_dtype: str = "auto"
    deterministic: bool = False


class Step(NamedTuple):
    """A step: computed tokens, sampled tokens, and seconds since the last report."""

    computed: int
    sampled: int
    seconds: float


class Said(NamedTuple):
    """The tokens of a sequence and their log probabilities."""

    token_ids: list[int]
    logprobs: list[SampledLogprobs]


@dataclass(slots=True)
class Run:
    """What a run of sequences gave: its steps, and by sequence what it said."""

    steps: list[Step] = field(default_factory=list)
    said: dict[str, Said] = field(default_factory=dict)

    def median_ms(self, computed: int) -> float:
        """Returns the median milliseconds of the steps that compute so many tokens, without the first quarter."""
        times = [step.seconds for step in self.steps if step.computed == computed]
        return 1e3 * statistics.median(times[len(times) // 4 :])


class Runner:
    """Runs sequences through the engine's loop."""

    def __init__(self, worker: ModelWorker, max_num_seqs: int) -> None:
        self.worker, self._max_num_seqs = worker, max_num_seqs

    def sequence(self, name: str, length: int, num_tokens: int, **params: Any) -> SequenceSpec:
        """Returns a sequence with a random prompt, which follows from the name. Greedy without further parameters."""
        draw = np.random.default_rng(list(name.encode())).integers(1, self.worker.facts().vocab_size, length)
        given = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **params}
        return SequenceSpec(sequence_id=name, prompt_token_ids=tuple(draw.tolist()), params=SamplingParams(**given))

    def batch(self, count: int, length: int, num_tokens: int, **params: Any) -> list[SequenceSpec]:
        """Returns `count` sequences like `sequence`."""
        return [self.sequence(str(index), length, num_tokens, **params) for index in range(count)]

    def run(
        self,
        sequences: Iterable[SequenceSpec],
        budget: int,
        after: Callable[[Engine, Run], None] = lambda engine, run: None,
        drafts: int = 0,
    ) -> Run:
        """Runs sequences to their end. `budget`: tokens of a step; `drafts`: draft tokens of a sequence in a step.

        `after` is called after each step.
        """
        run, last = Run(), [time.perf_counter()]

        def note(report: StepReport) -> None:
            now = time.perf_counter()
            assert not report.refused, report.refused
            run.steps.append(Step(report.num_tokens, sum(len(x.token_ids) for x in report.outcomes), now - last[0]))
            last[0] = now
            for outcome in report.outcomes:
                said = run.said.setdefault(outcome.sequence_id, Said([], []))
                said.token_ids.extend(outcome.token_ids)
                said.logprobs.extend(outcome.logprobs)

        limits = CoreLimits(
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            num_speculative_tokens=drafts,
        )
        engine = Engine.of_worker(self.worker, limits, note)
        for sequence in sequences:
            if sequence.params.grammar is not None:
                engine.compile_grammar(sequence.params.grammar)
            engine.add(sequence)
        while engine.has_work:
            if engine.step():
                after(engine, run)
            else:
                # A grammar is compiled on another thread.
                engine.wait(0.01)
        synchronize()
        return run


class Loaded:
    """The worker of the last form that was asked for, and where its model is."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._form: Form | None = None
        self._runner: Runner | None = None
        self.start_s = 0.0

    def runner(self, form: Form, given: Given) -> Runner:
        """Returns the runner of a form."""
        if self._runner is not None and self._form != form:
            self._runner.worker.close()
            self._runner = None
            gc.collect()
        if self._runner is None:
            settings = settings_of(self.directory(given), form, given)
            started = time.perf_counter()
            worker = load_worker(settings)
            self.start_s = rounded(time.perf_counter() - started)
            assert isinstance(worker, TritonWorker), "the Triton worker cannot serve this model here"
            self._form, self._runner = form, Runner(worker, max(sizes_of(given).batches + sizes_of(given).compared))
            # Kernels that are compiled at their first launch.
            self._runner.run(self._runner.batch(2, sizes_of(given).context // 3, 4), sizes_of(given).prefill)
        return self._runner

    def directory(self, given: Given) -> Path:
        """Returns the directory of the model, which is made if it is not there."""
        path = Path(self._directory.name) / LARGE
        return path if path.exists() else make(LARGE, path.parent, tiny=given.tiny)

    def work(self, form: Form, given: Given) -> Work:
        """Returns what the steps of a form read and multiply."""
        worker, d = self.runner(form, given).worker, describe_model(self.directory(given))
        assert isinstance(worker, TritonWorker)
        # Of the embedding a step reads only a row for each token.
        read = worker.memory.weights_bytes - 2 * d.vocab_size * d.hidden_size
        return Work(description=d, weights_bytes=read, kv_itemsize=2 if form.kv_cache_dtype == "auto" else 1)


LOADED = Loaded()


def sizes_of(given: Given) -> Sizes:
    """Returns the sizes of this run."""
    return TINY if given.tiny else Sizes()


def settings_of(directory: Path, form: Form, given: Given) -> EngineSettings:
    """Returns the settings of an engine that can run all parts."""
    sizes = sizes_of(given)
    on_cpu: dict[str, Any] = {"cpu_backend": "triton", "num_gpu_blocks_override": 64}
    # On a CPU there is no `fp8`.
    quantization = "ifq" if form.quantization == "fp8" and not given.on_device else form.quantization
    return EngineSettings(
        model=str(directory),
        load_format="dummy",
        device=DEVICE.type,
        quantization=quantization,
        kv_cache_dtype=form.kv_cache_dtype,
        deterministic=form.deterministic,
        # The check of `--deterministic` has a row of its own.
        max_num_seqs=max(sizes.batches + sizes.compared) + form.deterministic,
        max_num_batched_tokens=sizes.prefill,
        max_model_len=sizes.long + 2 * sizes.steps,
        use_lookahead=not form.deterministic,
        use_v2_block_manager=not form.deterministic,
        num_speculative_tokens=0 if form.deterministic else sizes.drafts,
        swap_space=0.0,
        **({} if given.on_device else on_cpu),
    )


def decode(form: Form, given: Given, *, top_p: bool = True) -> Found:
    """Returns the times of steps in which all sequences decode, and of a long prefill, with their floors."""
    runner, sizes = LOADED.runner(form, given), sizes_of(given)
    work, found = LOADED.work(form, given), Found(start_s=LOADED.start_s)
    found["num_blocks"] = runner.worker.facts().num_blocks
    roofs = given.earlier.get("roofs", {})
    rates = Rates.of(roofs, fp8=form.quantization == "fp8") if "gemm_tflop_s" in roofs else None
    for batch in sizes.batches:
        ms = runner.run(runner.batch(batch, sizes.context, sizes.steps), sizes.prefill).median_ms(batch)
        # In the middle of the measured steps.
        floor = None if rates is None else work.decode_ms(batch, sizes.context + sizes.steps // 2, rates)
        found[f"decode, batch {batch}"] = _beside_floor(ms, batch, floor)
        if top_p:
            drawn = runner.batch(batch, sizes.context, sizes.steps, temperature=1.0, top_p=0.9, seed=1)
            sampled = runner.run(drawn, sizes.prefill).median_ms(batch)
            found[f"decode, batch {batch}, top-p"] = {"ms": rounded(sampled), "of_greedy": rounded(sampled / ms)}
    prompts = [[runner.sequence(f"prompt {seed}", sizes.prefill, 1)] for seed in range(3)]
    ms = 1e3 * min(sum(step.seconds for step in runner.run(prompt, sizes.prefill).steps) for prompt in prompts)
    floor = None if rates is None else work.prefill_ms(sizes.prefill, rates)
    found[f"prefill, {sizes.prefill}"] = _beside_floor(ms, sizes.prefill, floor)
    return found


def _beside_floor(ms: float, tokens: int, floor_ms: float | None) -> Found:
    found: Found = {"ms": rounded(ms), "tokens_s": rounded(1e3 * tokens / ms)}
    if floor_ms is not None:
        found |= {"floor_ms": rounded(floor_ms), "of_floor_percent": rounded(100 * floor_ms / ms)}
    return found


def forms_of_products(given: Given) -> Found:
    """Returns decode with 16 bits, and the times of the forms that its products have."""
    found = decode(Form(), given)
    if given.on_device:
        found["forms of products, ms"] = Kept("", measured_with(DEVICE)).read()
    return found


def steps(given: Given) -> Found:
    """Returns the times of steps that are not plain decoding, and their ratio to plain steps of the same batch."""
    runner, sizes = LOADED.runner(Form(), given), sizes_of(given)
    count = sizes.joined
    plain = runner.batch(count, sizes.context, sizes.steps)
    usual = runner.run(plain, sizes.prefill).median_ms(count)

    def beside(ms: float) -> Found:
        return {"ms": rounded(ms), "of_a_step": rounded(ms / usual)}

    found: Found = {f"{count} sequences": {"ms": rounded(usual)}}
    masked = runner.sequence("masked", sizes.context, sizes.steps, grammar=DIGITS)
    ms = runner.run([*plain[1:], masked], sizes.prefill).median_ms(count)
    found[f"1 of {count} with a grammar"] = beside(ms)
    long = runner.sequence("long", sizes.long, sizes.steps)
    found[f"1 of {count} has {sizes.long} tokens"] = beside(
        runner.run([*plain[1:], long], sizes.prefill).median_ms(count)
    )
    joining = [runner.sequence("joining", sizes.joining, 2)]

    def join(engine: Engine, run: Run) -> None:
        if joining and sum(step.computed == count - 1 for step in run.steps) >= sizes.steps // 4:
            engine.add(joining.pop())

    joined = runner.run(plain[1:], sizes.prefill, join).steps
    at = next(step.seconds for step in joined if step.computed == count - 1 + sizes.joining)
    found[f"{sizes.joining} tokens join {count - 1} sequences"] = beside(1e3 * at)
    return found | {f"draft tokens, {batch}": _drafts(runner, batch, sizes) for batch in (1, min(8, count))}


def _drafts(runner: Runner, batch: int, sizes: Sizes) -> Found:
    """Returns the tokens a second with and without draft tokens, of prompts that repeat a few tokens."""
    found: Found = {}
    for name, drafts in (("off", 0), ("on", sizes.drafts)):
        sequences = [
            SequenceSpec(
                sequence_id=each.sequence_id,
                prompt_token_ids=(each.prompt_token_ids[:8] * sizes.context)[: sizes.context],
                params=each.params,
            )
            for each in runner.batch(batch, 8, 4 * sizes.steps)
        ]
        decoding = [step for step in runner.run(sequences, sizes.prefill, drafts=drafts).steps if step.sampled][1:]
        tokens, seconds = sum(step.sampled for step in decoding), sum(step.seconds for step in decoding)
        found[name] = {
            "tokens_s": rounded(tokens / seconds),
            "step_ms": rounded(1e3 * seconds / len(decoding)),
            "tokens_a_step": rounded(tokens / len(decoding) / batch),
        }
    return found


def profile(given: Given) -> Found:
    """Returns the kernels of five steps at each batch size, and of steps that a prompt joins."""
    runner, sizes = LOADED.runner(Form(), given), sizes_of(given)
    found: Found = {}
    for batch in sizes.batches:
        for name, params in {"greedy": {}, "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 1}}.items():
            sequences = runner.batch(batch, sizes.context, sizes.steps, **params)
            found[f"decode, batch {batch}, {name}"] = profiled(
                lambda after, sequences=sequences: runner.run(sequences, sizes.prefill, after),
                lambda run, batch=batch: sum(step.computed == batch for step in run.steps) >= sizes.steps // 2,
            )
    return found


def batches(form: Form, given: Given) -> Found:
    """Returns for each batch size whether a sequence has the bits that it has alone, and how far it is from them."""
    runner, sizes = LOADED.runner(form, given), sizes_of(given)
    alone: Said | None = None
    found: Found = {}
    for count in sizes.compared:
        sequences = runner.batch(count, sizes.context // 4, 8, logprobs=_TOP)
        said = runner.run(sequences, sizes.prefill).said["0"]
        alone = said if alone is None else alone
        found[f"batch {count}"] = compared(said, alone)
    return found


def compared(ours: Said, theirs: Said) -> Found:
    """Returns whether bits are equal, and the largest difference of a log probability while the tokens are."""
    same = next(
        (at for at, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if len(set(pair)) > 1),
        len(ours.token_ids),
    )
    furthest = 0.0
    for one, other in zip(ours.logprobs[: same + 1], theirs.logprobs[: same + 1], strict=True):
        known = dict(zip(other.top_token_ids, other.top_logprobs, strict=True))
        pairs = zip(one.top_token_ids, one.top_logprobs, strict=True)
        furthest = max([furthest, *(abs(value - known[token]) for token, value in pairs if token in known)])
    return {"equal": ours == theirs, "equal tokens": same, "logprob differs by": rounded(furthest)}


def deterministic(given: Given) -> Found:
    """Returns decode and the comparison of batches, of which none may differ."""
    form, sizes = Form(deterministic=True), sizes_of(given)
    runner = LOADED.runner(form, given)
    found: Found = {"batches": batches(form, given)}
    wrong = [name for name, each in found["batches"].items() if not each["equal"]]
    limits = CoreLimits(max_num_seqs=max(sizes.compared), max_num_batched_tokens=sizes.prefill, has_canary_row=True)
    try:
        check_deterministic(Executor(runner.worker), limits)
    except SettingsError as error:
        wrong.append(str(error))
    return found | decode(form, given, top_p=False) | {"wrong": wrong}


FORMS: Sequence[tuple[str, Form]] = (
    ("8B: fp8", Form(quantization="fp8")),
    ("8B: cache fp8", Form(kv_cache_dtype="fp8")),
    ("8B: fp8, cache fp8", Form(quantization="fp8", kv_cache_dtype="fp8")),
    ("8B: ifq", Form(quantization="ifq")),
    ("8B: ifq_nf4", Form(quantization="ifq_nf4")),
)
PARTS = {
    "8B: decode": forms_of_products,
    "8B: steps": steps,
    "8B: profile": profile,
    "8B: batches": partial(batches, Form()),
    **{name: partial(decode, form, top_p=False) for name, form in FORMS},
    "8B: deterministic": deterministic,
}

if __name__ == "__main__":
    compute_parts(PARTS)
