"""Measures latency and throughput of a model in this process. Outputs always have full length (`ignore_eos`)."""

import time
from typing import Any

from antiphon.benchmark.figures import Figures, spread
from antiphon.benchmark.load import prompts
from antiphon.offline.engine_args import engine_args
from antiphon.offline.prompts.inputs import Prompt
from antiphon.offline.runner import Runner
from antiphon.offline.sampling_params import SamplingParams
from antiphon.shared.request.outputs import RequestOutput


class OfflineBenchmark:
    """A loaded model. `settings`: arguments of `EngineArgs`. Raises the errors of `LLM`."""

    def __init__(self, settings: dict[str, Any], input_len: int, output_len: int, seed: int) -> None:
        # Prompts repeat between iterations; without this, the prefix cache would distort the measurement.
        self._runner = Runner(engine_args(**{"enable_prefix_caching": False, **settings}))
        room = self._runner.engine.max_model_len
        if input_len + output_len > room:
            self._runner.close()
            raise ValueError(
                f"--input-len and --output-len are {input_len + output_len} tokens, the context is {room}."
            )
        self._input_len, self._seed, self._number = input_len, seed, 0
        self._params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False)

    def latency(self, batch_size: int, warmup: int, iterations: int) -> Figures:
        """Returns the durations in seconds of batches whose requests start and end together."""
        for _ in range(warmup):
            self._batch(batch_size)
        seconds = [self._batch(batch_size)[0] for _ in range(iterations)]
        return {"batch_size": batch_size, "iterations": iterations, **spread("latency", seconds)}

    def throughput(self, num_prompts: int) -> Figures:
        """Returns the throughput of many prompts submitted at once."""
        self._batch(1)
        seconds, outputs = self._batch(num_prompts)
        num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
        num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "requests": num_prompts,
            "duration_s": seconds,
            "requests_per_s": num_prompts / seconds,
            "output_tokens_per_s": num_output / seconds,
            "total_tokens_per_s": (num_prompt + num_output) / seconds,
        }

    def close(self) -> None:
        """Frees the model's memory."""
        self._runner.close()

    def _batch(self, size: int) -> tuple[float, list[RequestOutput]]:
        self._number += 1
        drawn = prompts(size, self._input_len, self._runner.engine.facts.vocab_size, self._seed + self._number)
        found = [Prompt(token_ids=tuple(ids)) for ids in drawn]
        names = [f"{self._number}/{index}" for index in range(size)]
        started = time.perf_counter()
        for request in self._runner.submitted_all(names, found, [self._params] * size, [0] * size):
            self._runner.add(request)
        ended: list[RequestOutput] = []
        while self._runner.has_work:
            ended += [output for output in self._runner.step() if output.finished]
        failed = next((output for output in ended if output.error_msg is not None), None)
        if failed is not None:
            raise ValueError(failed.error_msg)
        return time.perf_counter() - started, ended
