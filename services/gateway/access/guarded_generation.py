"""A generation within the limits of its key. Ends exactly once: then its limits are settled and its usage recorded."""

import time
from collections.abc import AsyncIterator

from services.gateway.access.call import Call
from services.gateway.access.quotas import Admission, KeyQuota
from services.gateway.access.usage import UsageLedger
from services.gateway.generation import (
    Backend,
    Generation,
    GenerationRequest,
    RequestTimes,
    SequenceUpdate,
    TokenCounts,
)
from shared import limits
from shared.errors import ServiceError
from shared.messages import UsageOutcome, UsageRecord

CHARS_PER_TOKEN = 4
"""For the estimate of a prompt's tokens before it is tokenized. The true number counts at the end."""


class GuardedGeneration:
    """Implements `generation.Generation` on top of a generation of `backend`, which starts after the admission."""

    def __init__(
        self,
        backend: Backend,
        request: GenerationRequest,
        call: Call,
        quota: KeyQuota | None,
        usage: UsageLedger,
    ) -> None:
        self._backend, self._request = backend, request
        self._call, self._quota, self._usage = call, quota, usage
        self._admission: Admission | None = None
        self._inner: Generation | None = None
        self._ended = False
        self._received_at, self._started_s, self._first_token_s = time.time(), time.perf_counter(), 0.0
        self._num_shown = 0
        self._finish_reasons: list[str] = []

    @property
    def num_prompt_tokens(self) -> int:
        """See Generation."""
        return self._inner.num_prompt_tokens if self._inner is not None else 0

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """See Generation."""
        return self._inner.prompt_token_ids if self._inner is not None else []

    @property
    def times(self) -> RequestTimes:
        """See Generation."""
        return self._inner.times if self._inner is not None else RequestTimes()

    @property
    def prompt_tail(self) -> str:
        """See Generation."""
        return self._inner.prompt_tail if self._inner is not None else ""

    @property
    def token_counts(self) -> TokenCounts:
        """See Generation."""
        return self._inner.token_counts if self._inner is not None else TokenCounts()

    async def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """See Generation. Also raises ServiceError('rate_limit_exceeded'), before the first item."""
        try:
            await self._admit()
            if self._ended:
                return
            record = self._request.record
            record.admitted()
            self._inner = self._backend.generate(self._request)
            async for batch in self._inner.updates():
                self._saw(batch)
                yield batch
                # The caller has passed this batch on: a stream has written it to the client's connection.
                for update in batch:
                    record.written(update.index, len(update.token_ids))
        except ServiceError as error:
            self._end("failed", error.code)
            raise
        self._end("completed")

    async def cancel(self, reason: str) -> None:
        """See Generation."""
        if self._inner is not None:
            await self._inner.cancel(reason)
        self._end("cancelled")
        self._request.record.closed()

    async def _admit(self) -> None:
        if self._quota is None:
            return
        try:
            admission = await self._quota.admit(estimated_tokens(self._request))
        finally:
            self._call.response_headers = self._quota.headers()
        if self._ended:  # cancelled meanwhile
            self._quota.withdraw(admission)
        else:
            self._admission = admission

    def _saw(self, batch: list[SequenceUpdate]) -> None:
        for update in batch:
            self._num_shown += len(update.token_ids) if not self._request.only_echoes else 0
            if update.finish_reason is not None:
                self._finish_reasons.append(update.finish_reason)
        if self._num_shown and not self._first_token_s:
            self._first_token_s = time.perf_counter() - self._started_s

    def _end(self, outcome: UsageOutcome, error_code: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        counts = self.token_counts
        self._request.record.ended(
            outcome, error_code, counts.prompt, counts.cached, counts.generated, tuple(self._finish_reasons)
        )
        if self._quota is not None and self._admission is not None:
            if self._inner is None:
                self._quota.withdraw(self._admission)
            else:
                self._quota.finish(self._admission, counts.prompt + counts.generated)
        if self._inner is not None:
            self._usage.record(self._record(counts, outcome, error_code))

    def _record(self, counts: TokenCounts, outcome: UsageOutcome, error_code: str) -> UsageRecord:
        return UsageRecord(
            request_id=self._request.request_id,
            gateway_id=self._usage.gateway_id,
            key=self._call.key.name,
            model=self._request.model,
            outcome=outcome,
            error_code=error_code,
            finish_reasons=tuple(self._finish_reasons),
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            computed_tokens=counts.computed,
            completion_tokens=self._num_shown,
            discarded_tokens=max(0, counts.generated - self._num_shown),
            received_at=self._received_at,
            time_to_first_token_s=self._first_token_s,
            duration_s=time.perf_counter() - self._started_s,
            client_request_id=self._call.client_request_id,
        )


def estimated_tokens(request: GenerationRequest) -> int:
    """Returns the tokens that are reserved for a request until its true number is known: prompts and output."""
    num_texts = request.num_prompts - len(request.token_ids)
    converted = max(num_texts, -(-request.num_characters // CHARS_PER_TOKEN))
    prompt = converted + request.num_given_tokens
    if request.pooling is not None:
        return prompt
    num_sequences = request.num_prompts * request.num_sequences
    return prompt + num_sequences * (request.params.max_tokens or limits.OUTPUT_ESTIMATE_TOKENS)
