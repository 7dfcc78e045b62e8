"""The output of a step of the C++ library, in arrays of numpy, and the step in the library's form.

No model and no state: `worker` creates a `StepAnswer` for each step that it launches.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.services.engine.backends.cpu.native import Step
from antiphon.services.engine.core.plan import SampledLogprobs
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from antiphon.services.engine.kernels.sampling import GREEDY_BELOW
from antiphon.services.engine.worker.batch.inputs import FlatStep
from antiphon.services.engine.worker.batch.prompt_logprobs import packed, report_logits
from antiphon.services.engine.worker.batch.sampler import Sampled, SamplingBatch, errors_of, sample
from antiphon.shared.messages import PromptLogprobs

_NO_BYTES, _NO_ROWS = ctypes.c_char * 0, np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TokenEmbeddings:
    """Embeddings of tokens that do not come from the embedding matrix: those of images and prompt adapters.

    `addresses`: for each token of a step the address of its embedding, or 0; `tables`: the tensors that hold them.
    """

    addresses: NDArray[np.int64]
    tables: list[torch.Tensor]


class AnswerSizes:
    """The sizes of a step's outputs, and the arrays of steps that need no logits and no sums, which are never written.

    `no_rows` [rows] is -1 everywhere: no logits are wanted.
    """

    def __init__(self, vocab: int, embedding: int, rows: int) -> None:
        self.vocab, self.embedding = vocab, embedding
        self.no_logits = np.empty((0, vocab), dtype=np.float32)
        self.no_sums = np.empty((0, embedding), dtype=np.float32)
        self.no_rows = np.full(rows, -1, dtype=np.int64)


class StepAnswer:
    """The output arrays of a step, and the embeddings of its virtual tokens.

    They hold, for each token whose logits are needed, the most likely token, its logit and the logarithm of the sum of
    exp(logit); the logits [n, vocab] of the sampled rows that need them, then of the reported prompt tokens; and the
    sums of hidden states [spans, hidden] (`FlatStep.spans`).
    """

    def __init__(
        self,
        batch: SamplingBatch | None,
        step: FlatStep,
        sizes: AnswerSizes,
        embeddings: TokenEmbeddings | None = None,
        *,
        keeps: bool = False,
        sources: NDArray[np.int64] | None = None,
    ) -> None:
        """`keeps`: whether the library keeps the tokens' hidden states. `sources`: those of a draft pass."""
        self._embeddings, self._keeps, self._sources = embeddings, keeps, sources
        count, self._num_samples = len(step.logit_tokens), len(step.rows)
        self.sums = np.empty((len(step.spans), sizes.embedding), dtype=np.float32) if len(step.spans) else sizes.no_sums
        if batch is None and count == self._num_samples:
            # Most steps: only the most likely tokens are needed. Fewer array operations shorten the step.
            self.needs_sampling, self.logits, self._rows = _NO_ROWS, sizes.no_logits, sizes.no_rows[:count]
        else:
            self.needs_sampling = _NO_ROWS if batch is None else rows_with_choice(batch)
            wanted = np.concatenate((self.needs_sampling, np.arange(self._num_samples, count)))
            self.logits = np.empty((len(wanted), sizes.vocab), dtype=np.float32)
            self._rows = np.full(count, -1, dtype=np.int64)
            self._rows[wanted] = np.arange(len(wanted))
        assert len(self._rows) == count, "more sampled tokens than rows"
        self._best = np.empty(count, dtype=np.int64)
        self._best_logit, self._log_total = np.empty((2, count), dtype=np.float32)

    def native(self, step: FlatStep) -> Step:
        """Returns the step in the library's form. `step` and this object own the memory."""
        return Step(
            len(step.ids),
            len(step.seq_lens),
            len(step.logit_tokens),
            len(self.logits),
            step.block_tables.shape[2],
            len(step.spans),
            self._keeps,
            address(step.ids),
            address(step.positions),
            0 if step.spatial is None else address(step.spatial),
            *map(address, (step.query_start_loc, step.block_tables, step.logit_tokens)),
            *map(address, (self._rows, self.logits, self._best, self._best_logit, self._log_total)),
            *map(address, (step.spans, self.sums)),
            0 if step.token_slots is None else address(step.token_slots),
            *_state_addresses(step.states),
            0 if self._embeddings is None else address(self._embeddings.addresses),
            0 if self._sources is None else address(self._sources),
        )

    @property
    def best(self) -> NDArray[np.int64]:
        """The most likely token after each of the `logit_tokens`."""
        return self._best

    def sampled(self, batch: SamplingBatch | None) -> Sampled:
        """Returns the tokens and log probabilities of all sampled rows, in row order."""
        tokens, count = self._best[: self._num_samples], self._num_samples
        logprobs = [SampledLogprobs(x) for x in (self._best_logit[:count] - self._log_total[:count]).tolist()]
        if batch is not None and len(self.needs_sampling):
            with torch.inference_mode():
                chosen = sample(
                    torch.from_numpy(self.logits[: len(self.needs_sampling)]), batch.take(self.needs_sampling)
                )
            tokens[self.needs_sampling] = chosen.token_ids
            for row, logprob in zip(self.needs_sampling.tolist(), chosen.logprobs, strict=True):
                logprobs[row] = logprob
        if batch is None:
            return Sampled(tokens, tuple(logprobs))
        return Sampled(tokens, tuple(logprobs), errors_of(batch), batch.waiting)

    def reported(self, step: FlatStep) -> tuple[PromptLogprobs, ...]:
        """Returns the log probabilities of prompts that the step reports."""
        if step.report is None:
            return ()
        with torch.inference_mode():
            logits, token_ids = (
                torch.from_numpy(self.logits[len(self.needs_sampling) :]),
                torch.from_numpy(step.report.token_ids),
            )
            return packed(step.report, report_logits(logits, token_ids, step.report.num_top))


def _state_addresses(moves: StateMoves | None) -> Iterable[int]:
    if moves is None:
        return 0, 0, 0, 0
    return map(address, (moves.sources, moves.starts, moves.ends, moves.slots))


def address(array: NDArray[np.generic]) -> int:
    """Returns the address of the first element. Raises TypeError if the array has gaps or must not be written."""
    # A quarter of the time of `__array_interface__`, and a step asks a dozen times. numpy's types lack `__buffer__`.
    return ctypes.addressof(_NO_BYTES.from_buffer(array))  # pyright: ignore[reportArgumentType]


def rows_with_choice(batch: SamplingBatch) -> NDArray[np.int64]:
    """Returns the rows that need more than the most likely token and its log probability."""
    needs_sampling = (batch.columns.temperature >= GREEDY_BELOW) | (batch.num_logprobs > 0)
    needs_sampling[batch.penalised] = True
    needs_sampling[batch.adjusted] = True
    return np.flatnonzero(needs_sampling)
