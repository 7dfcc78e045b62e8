"""A deterministic model without arithmetic, and what it gives an unfaulted client.

The next token is a hash of everything before it. Each token is one byte (see `make_tokenizer`), so that the reference
of a request is computed here without any part of the product.
"""

import hashlib
from array import array
from collections import deque
from dataclasses import dataclass

from antiphon.services.engine.core.plan import EngineFacts, SampledLogprobs, ScheduledSequence, StepPlan, StepResult
from antiphon.shared.codec import pack_ids
from antiphon.shared.messages import PromptLogprobs
from antiphon.shared.parameters.pooling import PoolingKind
from antiphon.shared.parameters.sampling import SamplingParams

VOCABULARY = 256
EMBEDDING_SIZE = 8
EOS = 0


@dataclass(frozen=True)
class HashModel:
    """One model. `wide`: some characters take two to four tokens. `ends`: of 256 tokens, how many are the end token."""

    name: str = ""
    wide: bool = False
    ends: int = 0

    def next_token(self, tokens: list[int], salt: int) -> int:
        """The token after `tokens`; `salt` is the seed of a sequence that samples, else 0."""
        digest = hashlib.sha256(f"{self.name}/{salt}/".encode() + bytes(tokens)).digest()
        if self.wide:
            missing = _missing_bytes(tokens)
            if missing:
                return 0x80 | digest[0] & 0x3F
            if digest[1] < 60:
                return (0xC5, 0xC5, 0xE3, 0xF1)[digest[2] % 4]
        if digest[3] < self.ends:
            return EOS
        return 32 + digest[0] % 90

    def vector(self, tokens: list[int], kind: PoolingKind) -> bytes:
        """The vector of a pooling sequence."""
        digest = hashlib.sha256(f"{self.name}/{kind}/".encode() + bytes(tokens)).digest()
        return array("f", digest[:EMBEDDING_SIZE]).tobytes()

    def candidates(self, tokens: list[int], count: int) -> list[tuple[int, float]]:
        """The likeliest tokens of a beam search after `tokens`, best first, with their log probabilities."""
        digest = hashlib.sha256(f"{self.name}/candidates/".encode() + bytes(tokens)).digest()
        found = [32 + (digest[0] + 7 * number) % 90 for number in range(count)]
        if digest[3] < 8 * self.ends:
            found[digest[4] % count] = EOS
        best, step = (digest[1] + 1) / 256, (digest[2] + 1) / 256
        return [(token_id, -best - step * number) for number, token_id in enumerate(found)]


@dataclass(frozen=True)
class Reference:
    """What a client gets of one sequence when nothing fails."""

    token_ids: tuple[int, ...]
    text: str
    finish: str
    stop_reason: str | None = None
    vector: bytes = b""
    """Of a pooling sequence, which has no tokens."""


def reference(
    model: HashModel, prompt: list[int], salt: int, max_tokens: int, stop: str = "", include_stop: bool = False
) -> Reference:
    """The whole output of one sequence. `stop` is its only stop string, if not empty."""
    tokens, count = list(prompt), len(prompt)
    while True:
        tokens.append(model.next_token(tokens, salt))
        output = tokens[count:]
        if stop:
            found = whole_text(output).find(stop)
            if found >= 0:
                end = found + len(stop) * include_stop
                return Reference(tuple(output), whole_text(output)[:end], "stop", stop)
        if tokens[-1] == EOS:
            return Reference(tuple(output), whole_text(output), "stop")
        if len(output) >= max_tokens:
            return Reference(tuple(output), whole_text(output), "length")


def pooled_reference(model: HashModel, prompt: list[int], kind: PoolingKind) -> Reference:
    """What a pooling sequence gives."""
    return Reference((), "", "stop", vector=model.vector(prompt, kind))


def beam_references(model: HashModel, prompt: list[int], width: int, max_tokens: int) -> list[Reference]:
    """The results of a beam search, best first."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        found = [
            (total + logprob, [*output, token])
            for total, output in running
            for token, logprob in model.candidates(prompt + output, width + 1)
        ]
        found.sort(key=lambda one: -one[0])
        ended = [one[1][-1] == EOS or length == max_tokens for one in found]
        finished += [
            (total / length, output) for (total, output), ends in zip(found[:width], ended, strict=False) if ends
        ]
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        running = [one for one, ends in zip(found, ended, strict=True) if not ends][:width]
        if not running or (len(finished) == width and running[0][0] / length <= finished[-1][0]):
            break
    return [
        Reference(tuple(output), whole_text(output), "stop" if output[-1] == EOS else "length")
        for _, output in finished
    ]


WAITS_EVERY = 13
"""In one of so many steps a row waits."""


def whole_text(token_ids: list[int]) -> str:
    """The text of output tokens; an unfinished character at the end is a replacement character."""
    return bytes(token_ids).decode("utf-8", "replace")


class HashWorker:
    """A worker of the model. It keeps the state table as a real one does, so wrong plans show."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        num_host_blocks: int = 0,
        model: HashModel = HashModel(),
        waits: bool = False,
    ) -> None:
        """`waits`: whether in some steps a row gets no token, as if it waited for the mask of a grammar."""
        self._may_wait = waits
        ends = frozenset({EOS})
        self._facts = EngineFacts(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCABULARY,
            eos_token_ids=ends,
            num_host_blocks=num_host_blocks,
            embedding_size=EMBEDDING_SIZE,
            pooling_kind="mean",
        )
        self._model = model
        self._pooling: dict[int, PoolingKind] = {}
        self._num_seen: dict[int, int] = {}
        """Positions of which the row's present sequence has had hidden states, from the first on."""
        self._rows: dict[int, list[int]] = {}
        self._salts: dict[int, int] = {}
        self._params: dict[int, SamplingParams] = {}
        self.num_computed = 0

    def facts(self) -> EngineFacts:
        return self._facts

    def run(self, plan: StepPlan) -> StepResult:
        self.num_computed += plan.num_tokens
        for row in plan.freed_rows:
            del self._rows[row]
        for new in plan.new:
            assert new.row not in self._rows, f"row {new.row} is taken"
            self._rows[new.row] = list(new.token_ids)
            self._salts[new.row] = new.params.seed if new.params.temperature else 0
            self._num_seen[new.row] = 0
            self._pooling.pop(new.row, None)
            if new.pooling is not None:
                assert new.pooling.kind is not None
                self._pooling[new.row] = new.pooling.kind
            self._params[new.row] = new.params
        reports = tuple(self._prompt_report(share) for share in plan.scheduled if share.num_prompt_logprobs)
        logprobs: list[tuple[SampledLogprobs, ...]] = []
        sampled: list[tuple[int, ...]] = []
        vectors: list[bytes] = []
        for scheduled in plan.scheduled:
            if scheduled.start == self._num_seen[scheduled.row]:
                self._num_seen[scheduled.row] += scheduled.num_tokens
            assert scheduled.row not in self._pooling or not scheduled.samples
            if scheduled.pools:
                tokens, kind = self._rows[scheduled.row], self._pooling[scheduled.row]
                assert kind == "last" or self._num_seen[scheduled.row] == len(tokens), "hidden states are missing"
                vectors.append(self._model.vector(tokens, kind))
            if scheduled.samples:
                tokens = self._rows[scheduled.row]
                assert scheduled.start + scheduled.num_tokens == len(tokens)
                if self._waits(plan.step, scheduled.row):
                    sampled.append(())
                    logprobs.append(())
                    continue
                logprobs.append((self._logprobs(scheduled.row),))
                token = self._model.next_token(tokens, self._salts[scheduled.row])
                tokens.append(token)
                sampled.append((token,))
        return StepResult(
            step=plan.step,
            token_ids=tuple(sampled),
            logprobs=tuple(logprobs),
            prompt_logprobs=reports,
            vectors=tuple(vectors),
        )

    def _waits(self, step: int, row: int) -> bool:
        return self._may_wait and self._params[row].beam is None and hash((step, row)) % WAITS_EVERY == 0

    def _logprobs(self, row: int) -> SampledLogprobs:
        params = self._params[row]
        if params.beam is None:
            return SampledLogprobs(-1.0, (65, 66, 67, 68, 69, 70), (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0))
        assert params.logprobs is not None
        token_ids, logprobs = zip(*self._model.candidates(self._rows[row], params.logprobs), strict=True)
        return SampledLogprobs(-1.0, token_ids, logprobs)

    def _prompt_report(self, share: ScheduledSequence) -> PromptLogprobs:
        count, num_top = share.num_prompt_logprobs, self._params[share.row].prompt_logprobs or 0
        token_ids = self._rows[share.row][share.start + 1 : share.start + 1 + count]
        return PromptLogprobs(
            start=share.start + 1, token_ids=pack_ids(token_ids), logprobs=bytes(4 * count), num_top=num_top,
            top_token_ids=pack_ids([65] * count * num_top), top_logprobs=bytes(4 * count * num_top),
        )  # fmt: skip

    def close(self) -> None:
        self._rows.clear()


class PipelinedHashWorker(HashWorker):
    """The same, taking the next plan before the result of the last one is collected. So no row may wait."""

    def __init__(self, *args: int, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._results: deque[StepResult] = deque()

    def takes_another(self) -> bool:
        return len(self._results) < 2

    def _waits(self, step: int, row: int) -> bool:
        return False

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self.run(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()


def next_token(tokens: list[int], salt: int) -> int:
    """The plain model's next token. Never EOS, so that lengths are known."""
    return HashModel().next_token(tokens, salt)


def _missing_bytes(tokens: list[int]) -> int:
    """Continuation bytes that the last character still needs."""
    for back, token in enumerate(reversed(tokens[-4:])):
        if token & 0xC0 == 0x80:
            continue
        length = 4 if token >= 0xF0 else 3 if token >= 0xE0 else 2 if token >= 0xC0 else 1
        return max(0, length - 1 - back)
    return 0
