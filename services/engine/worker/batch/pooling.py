"""Pooling sequences in the worker: the hidden states of a step that they need, and the computation of their vectors.

For each scheduled sequence that contributes to a vector, a step computes the sum of the hidden states of a span of its
tokens:

    last    the last token of the sequence        cls     its first token
    mean    all its tokens in this step

The sums of a sequence's steps are added up in `float64`; the last step completes the vector. A sequence that was
preempted is computed again from its first token if the kind of pooling needs it (`Sequence.reuses_kv` in the core); its
sum then starts anew. Called by the workers: `join` and `spans` when a plan is launched, `take` when it is collected, in
the order of the plans.
"""

from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.core.plan import ScheduledSequence, StepPlan, StepResult
from antiphon.services.engine.worker.loading.model_files import SENTENCE_MODULES, read_json, read_json_list
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.pooling import PoolingKind, PoolingParams

Integers = NDArray[np.int64]
NO_SPANS: Integers = np.zeros((0, 2), dtype=np.int64)
NO_SUMS: NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
_FLOAT = np.dtype("<f4")
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_SHORT_MODES = {"lasttoken": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token"}
_MODULES = ("Transformer", "Pooling", "Normalize")
"""Supported modules of a sentence-transformers model; a model with other modules is refused, because its vectors would
be wrong.
"""


class PoolingRows:
    """The pooling sequences of one worker, by row. Rows of other sequences have no entry."""

    def __init__(self, embedding_size: int) -> None:
        self._size = embedding_size
        self.params: dict[int, PoolingParams] = {}
        """Their parameters. Without any, the other methods have nothing to do."""
        self._sums: dict[int, NDArray[np.float64]] = {}

    def join(self, plan: StepPlan) -> None:
        """Removes the sequences whose rows the plan frees, and adds those that get a row."""
        for row in plan.freed_rows if self.params else ():
            self._forget(row)
        for sequence in plan.new:
            if sequence.pooling is not None:
                self.params[sequence.row] = sequence.pooling
                self._sums[sequence.row] = np.zeros(self._size)

    def spans(self, plan: StepPlan) -> Integers:
        """Returns [n, 2]: for each contributing sequence, the indices of its first token and after its last.

        Tokens are counted from the beginning of the step.
        """
        if not self.params:
            return NO_SPANS
        found: list[tuple[int, int]] = []
        first = 0
        for share in plan.scheduled:
            params = self.params.get(share.row)
            if params is not None and (span := _span(share, params)) is not None:
                found.append((first + span[0], first + span[1]))
            first += share.num_tokens
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def take(self, plan: StepPlan, sums: NDArray[np.float32]) -> tuple[bytes, ...]:
        """Adds a step's sums [n, hidden] for `spans`. Returns the packed vectors that the step completes."""
        if not self.params:
            return ()
        vectors: list[bytes] = []
        parts = iter(sums)
        for share in plan.scheduled:
            params = self.params.get(share.row)
            if params is None:
                continue
            if _span(share, params) is not None:
                self._sums[share.row] += next(parts)
            if share.pools:
                num_tokens = share.start + share.num_tokens
                vectors.append(finished(self._sums[share.row], num_tokens, params).tobytes())
                self._forget(share.row)
        return tuple(vectors)

    def _forget(self, row: int) -> None:
        self.params.pop(row, None)
        self._sums.pop(row, None)


def finished(total: NDArray[np.float64], num_tokens: int, params: PoolingParams) -> NDArray[np.float32]:
    """Returns the vector of a sequence of `num_tokens` tokens, from the sum [hidden] over its steps.

    A vector of zeros is returned unchanged, because it cannot be normalized.
    """
    vector = total / num_tokens if params.kind == "mean" else total
    vector = vector[: params.dimensions]
    length = float(np.linalg.norm(vector)) if params.normalize else 0.0
    return (vector / length if length else vector).astype(_FLOAT)


def span_sums(hidden: Tensor, spans: Integers) -> Tensor:
    """Returns the sums [n, hidden] float32 of the rows of `hidden` [num_tokens, hidden] in each span."""
    return torch.stack([hidden[first:end].sum(0, dtype=torch.float32) for first, end in spans.tolist()])


def with_vectors(result: StepResult, vectors: tuple[bytes, ...]) -> StepResult:
    """Returns the result of a step with the vectors that it completed."""
    return msgspec.structs.replace(result, vectors=vectors) if vectors else result


def pooling_kind(model_dir: Path, usual: PoolingKind = "last") -> PoolingKind:
    """Returns the model's own kind, from the files of sentence-transformers; `usual` for a model without them.

    Raises `ServiceError` if these files require other modules than pooling and normalization.
    """
    names = [str(module.get("type", "")).rpartition(".")[2] for module in read_json_list(model_dir / SENTENCE_MODULES)]
    modes = read_json(model_dir / "1_Pooling" / "config.json")
    chosen = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
    short = modes.get("pooling_mode")
    if isinstance(short, str):
        chosen.append(_SHORT_MODES.get(short, f"pooling_mode_{short}_tokens"))
    foreign = [name for name in names if name not in _MODULES] + [name for name in chosen if name not in _MODES]
    if foreign or len(chosen) > 1:
        message = f"{model_dir}: embeddings with {', '.join(foreign or chosen)} are not supported. "
        message += f"Supported: {', '.join(_MODULES)}, with one of {', '.join(_MODES)}."
        raise ServiceError("invalid_value", message, param="model")
    return _MODES[chosen[0]] if chosen else usual


def _span(share: ScheduledSequence, params: PoolingParams) -> tuple[int, int] | None:
    """Returns the span of scheduled tokens that contribute to the vector, relative to the first; None if none do."""
    if params.kind == "mean":
        return 0, share.num_tokens
    if params.kind == "cls":
        return (0, 1) if share.start == 0 else None
    return (share.num_tokens - 1, share.num_tokens) if share.pools else None
