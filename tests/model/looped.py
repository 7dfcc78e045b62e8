"""Requests through the step loop, as an engine runs them: with plans made ahead where the worker takes them."""

from collections import defaultdict
from typing import Any

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.messages import PromptLogprobs
from antiphon.shared.parameters.sampling import SamplingParams


class Output:
    """What the reports of a loop say, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[Any]] = defaultdict(list)
        self.prompts: dict[str, list[PromptLogprobs]] = defaultdict(list)

    def report(self, report: StepReport) -> None:
        assert not report.refused
        for outcome in report.outcomes:
            assert outcome.position == len(self.tokens[outcome.sequence_id])
            self.tokens[outcome.sequence_id] += outcome.token_ids
            self.logprobs[outcome.sequence_id] += outcome.logprobs
            self.prompts[outcome.sequence_id] += outcome.prompt_logprobs


def run(
    worker: ModelWorker, requests: list[tuple[list[int], dict[str, Any]]], num_tokens: int, **limits: Any
) -> Output:
    """All requests through the loop; the last one joins when the others are running."""
    output = Output()
    bounds = CoreLimits(**{"max_num_seqs": 4, "max_num_batched_tokens": 14, **limits})
    engine = Engine.of_worker(worker, bounds, output.report)
    for number, (prompt, params) in enumerate(requests):
        fields = {"max_tokens": num_tokens, "ignore_eos": True, **params}
        if number == len(requests) - 1:
            engine.step()
        params = SamplingParams(**fields)
        family = f"beams {params.beam.width}" if params.beam is not None else ""
        engine.add(
            SequenceSpec(sequence_id=f"r{number}", prompt_token_ids=tuple(prompt), params=params, sequence_group=family)
        )
    while engine.step():
        pass
    assert not engine.has_work
    return output
