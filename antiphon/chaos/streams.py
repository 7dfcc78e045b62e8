"""Runs streams while processes are killed, and compares each with the answer to the same request without faults.

A request is greedy, or sampled with a seed; its answer has token ids and text. The death of a gateway ends its
connections. If the server's events have ids, the client resumes the stream after the last event on any gateway
(`resumed`). Otherwise, or if the server has lost the stream's record, the client repeats the request with the same seed
and compares from the start (`retried`).
"""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon.async_client import authorization, connected
from antiphon.launch.readiness import ServerAddress

RETRY_S = (0.1, 2.0)
"""Bounds of the wait before a refused or interrupted request is sent again, seconds."""
GAP_S = 0.02
"""Shortest time between two events that is remembered as a gap, seconds."""
LONG_GAP_S = 0.25
"""Shortest gap for whose explanation the timeline of the request is read, seconds."""
MATCH = 4
"""Number of equal tokens after which two sequences count as aligned again."""
EXPLAIN_PAUSE = 9
"""Pause after the reading of a timeline, as a multiple of the time that it took."""
_WORDS = ("the sea", "a letter", "seven birds", "an old clock", "the city", "two friends", "rain", "a long road")
_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.4},
    {"temperature": 0, "frequency_penalty": 0.3},
    {"temperature": 0.8, "top_k": 50},
)
"""Sampling parameters of the requests; those with a temperature above 0 get a seed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Numbers of tokens lost and repeated. `differing`: whether other tokens differ."""

    lost: int = 0
    repeated: int = 0
    differing: bool = False

    def __bool__(self) -> bool:
        return self.differing or bool(self.lost or self.repeated)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    error: Any = None


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its answer without faults."""

    body: dict[str, Any]
    token_ids: list[int]
    text: str


@dataclass(slots=True, kw_only=True)
class Answer:
    """The part of an answer received so far. `gaps`: beginnings and ends of silences, monotonic seconds."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: str = ""
    problem: str = ""
    """The reason why the answer is incomplete: an error event or an interrupted connection; empty if it is complete."""
    refused_s: float | None = None
    """The server had no capacity (503 or 429) and the request may be repeated after this many seconds."""
    interrupted: bool = False
    """The connection, or the gateway, ended before the answer did."""
    last_id: str = ""
    """The `id` of the last event, after which the stream can be resumed; empty if events have no ids."""
    is_forgotten: bool = False
    """Whether the server no longer knows the stream to be resumed."""
    completion_id: str = ""
    """The `id` of the completion, by which the server finds the timeline of the request."""
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    last_s: float | None = None
    """Time of the last event, possibly on an earlier connection; None before the first one."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one stream after all attempts. Times are monotonic seconds."""

    known: Known
    began_s: float
    ended_s: float = 0.0
    answer: Answer = field(default_factory=Answer)
    difference: Difference = field(default_factory=Difference)
    retried: int = 0
    resumed: int = 0
    refused: int = 0
    hung: bool = False
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    problem: str = ""
    timeline: dict[str, Any] | None = None
    """The timeline of the request. None without a gap of at least `LONG_GAP_S`, or if its gateway has died."""


def make_bodies(model: str, count: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Returns `count` different requests for completions."""
    chance = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for index, way in zip(range(count), itertools.cycle(_WAYS)):
        prompt = f"{index}. Tell me about {chance.choice(_WORDS)} and {chance.choice(_WORDS)}."
        body = {"model": model, "prompt": prompt, "max_tokens": chance.randint(max_tokens // 2, max_tokens), **way}
        if way["temperature"]:
            body["seed"] = chance.randrange(2**31)
        bodies.append({**body, "ignore_eos": True, "return_token_ids": True, "stream": True})
    return bodies


async def learn(server: ServerAddress, body: dict[str, Any], timeout_s: float) -> Known:
    """Returns the answer to a request while no faults are applied. Raises StreamError if there is none."""
    async with asyncio.timeout(timeout_s):
        answer = await ask(server, body, Answer())
    if answer.problem or answer.refused_s is not None or not answer.token_ids:
        raise StreamError(answer.problem or "the server has no capacity for an unfaulted answer")
    return Known(body, answer.token_ids, answer.text)


class StreamError(Exception):
    """A run without faults gave no usable answer."""


class Load:
    """Keeps `count` streams open until `stop`, and collects their outcomes.

    `gateway_failed(since_s, until_s)` says whether the failure of a gateway explains the early end of a stream that ran
    from `since_s` to `until_s`. `hang_s`: longest silence of one stream, seconds.
    """

    def __init__(
        self,
        server: ServerAddress,
        known: Sequence[Known],
        gateway_failed: Callable[[float, float], bool],
        *,
        hang_s: float,
        seed: int,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.live = 0
        self._server = server
        self._known = known
        self._gateway_failed = gateway_failed
        self._hang_s = hang_s
        self._chance = random.Random(seed)
        self._stopping = asyncio.Event()
        self._unexplained = asyncio.Queue[Outcome | None]()

    async def run(self, count: int) -> None:
        """Runs until `stop` is called and the streams that were open then have ended."""
        explaining = asyncio.create_task(self._explain())
        try:
            await asyncio.gather(*(self._one_after_another() for _ in range(count)))
            self._unexplained.put_nowait(None)
            await explaining
        finally:
            explaining.cancel()

    def stop(self) -> None:
        """Begins no further streams."""
        self._stopping.set()

    async def _one_after_another(self) -> None:
        while not self._stopping.is_set():
            self.live += 1
            try:
                outcome = await self._stream(self._chance.choice(self._known))
                self.outcomes.append(outcome)
                if any(end - begin >= LONG_GAP_S for begin, end in outcome.gaps):
                    self._unexplained.put_nowait(outcome)
            finally:
                self.live -= 1

    async def _explain(self) -> None:
        """Reads the timelines of streams that had long gaps, one at a time.

        While the streams run, it reads rarely: a gateway that answers does not pass on tokens, so that many questions
        after a fault would prolong the gaps that they are about.
        """
        while (outcome := await self._unexplained.get()) is not None:
            began_s = time.monotonic()
            outcome.timeline = await timeline_of(self._server, outcome.answer.completion_id)
            pause_s = EXPLAIN_PAUSE * (time.monotonic() - began_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _stream(self, known: Known) -> Outcome:
        outcome = Outcome(known=known, began_s=time.monotonic())
        while True:
            answer = await self._attempt(known, outcome)
            wait_s = RETRY_S[0]
            if answer.refused_s is not None:
                outcome.refused += 1
                wait_s = min(RETRY_S[1], max(RETRY_S[0], answer.refused_s))
            elif answer.is_forgotten:
                outcome.answer = Answer(last_s=answer.last_s)
                outcome.retried += 1
            elif not (answer.interrupted and self._is_excused(outcome)):
                break
            elif answer.last_id:
                outcome.resumed += 1
            else:
                outcome.answer = Answer(last_s=answer.last_s)
                outcome.retried += 1
            if time.monotonic() - outcome.began_s > 10 * self._hang_s:
                outcome.hung, outcome.problem = True, "no answer in spite of many attempts"
                break
            await asyncio.sleep(wait_s)
        outcome.ended_s = time.monotonic()
        outcome.problem = outcome.problem or answer.problem
        outcome.difference = _judge(known, answer)
        return outcome

    def _is_excused(self, outcome: Outcome) -> bool:
        return self._gateway_failed(outcome.began_s, time.monotonic())

    async def _attempt(self, known: Known, outcome: Outcome) -> Answer:
        answer, gaps = outcome.answer, len(outcome.answer.gaps)
        answer.problem, answer.interrupted, answer.refused_s = "", False, None
        task = asyncio.create_task(ask(self._server, known.body, answer))
        seen, quiet_since = -1, time.monotonic()
        while not task.done():
            await asyncio.wait({task}, timeout=1.0)
            if len(answer.token_ids) != seen:
                seen, quiet_since = len(answer.token_ids), time.monotonic()
            elif time.monotonic() - quiet_since > self._hang_s and not task.done():
                task.cancel()
                outcome.hung, answer.problem = True, f"silent for {self._hang_s:.0f} s"
        await asyncio.wait({task})
        outcome.gaps += answer.gaps[gaps:]
        return answer


async def timeline_of(server: ServerAddress, completion_id: str) -> dict[str, Any] | None:
    """Returns the timeline of a request; None if the server does not have it, or if its gateway dies meanwhile."""
    return await server.get_json(f"/v1/requests/{completion_id}/timeline") if completion_id else None


def _judge(known: Known, answer: Answer) -> Difference:
    difference = compare(known.token_ids, answer.token_ids)
    if not difference and not answer.problem and answer.text != known.text:
        return Difference(differing=True)
    return difference


async def ask(server: ServerAddress, body: dict[str, Any], answer: Answer) -> Answer:
    """Sends one request and fills `answer` while it arrives. Connection errors are recorded, not raised.

    A silence that began on an earlier connection of the same stream lasts until the first event of this one.
    """
    last_s = time.monotonic() if answer.last_s is None else answer.last_s
    try:
        async for chunk in _chunks(server, body, answer):
            if chunk.error is not None:
                answer.problem = f"error event: {json.dumps(chunk.error)}"
                # A gateway that ends sends this error to the clients of streams for which the bus has no record.
                answer.interrupted = chunk.error.get("code") == "draining"
                return answer
            now = time.monotonic()
            if now - last_s >= GAP_S:
                answer.gaps.append((last_s, now))
            last_s = answer.last_s = now
            answer.completion_id = chunk.id or answer.completion_id
            for choice in chunk.choices:
                answer.token_ids += choice.token_ids
                answer.text += choice.text
                answer.finish_reason = choice.finish_reason or answer.finish_reason
    except (OSError, EOFError, ValueError) as error:
        answer.problem, answer.interrupted = f"connection: {error or type(error).__name__}", True
    return answer


async def _chunks(server: ServerAddress, body: dict[str, Any], answer: Answer) -> AsyncIterator[_Chunk]:
    """Yields the events of a streamed completion up to `[DONE]`. Raises EOFError if the stream ends before it."""
    headers = {**authorization(server.token), "X-Antiphon-Resumable": "1"}
    headers |= {"Last-Event-ID": answer.last_id} if answer.last_id else {}
    async with connected(server.host, server.port) as connection:
        response = await connection.ask("POST", "/v1/completions", json.dumps(body).encode(), headers)
        if response.status in (429, 503):
            answer.refused_s = float(response.headers.get("retry-after", "1"))
        elif response.status == 404 and answer.last_id:
            answer.is_forgotten = True
        elif response.status != 200:
            answer.problem = f"HTTP {response.status}: {(await response.read(2000)).decode(errors='replace')}"
        if response.status != 200:
            return
        event_id = ""
        async for line in response.lines():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield msgspec.json.decode(line[6:], type=_Chunk)
                answer.last_id = event_id or answer.last_id
            elif line.startswith(b"id:"):
                event_id = line[3:].strip().decode()
        raise EOFError("ended without [DONE]")


def compare(known: Sequence[int], got: Sequence[int]) -> Difference:
    """Returns how `got` differs from `known`.

    At a mismatch, `known` is shifted by the smallest number of tokens after which the next `MATCH` tokens (or all that
    remain) are equal. Tokens of `known` that a shift forward skips are lost; tokens of `got` that a shift backward
    matches once more are repeated.
    """
    i = j = lost = repeated = 0
    while i < len(known) and j < len(got):
        if known[i] == got[j]:
            i, j = i + 1, j + 1
            continue
        shift = _shift(known, got, i, j)
        if shift is None:
            return Difference(lost, repeated, True)
        lost, repeated = lost + max(0, shift), repeated + max(0, -shift)
        i += shift
    # Tokens that remain in `got` came after the end of `known`.
    return Difference(lost + len(known) - i, repeated + len(got) - j)


def _shift(known: Sequence[int], got: Sequence[int], i: int, j: int) -> int | None:
    """Returns the shift of `known` after which it agrees with `got[j:]`; None if there is none.

    The shift is positive after a loss and negative after a repetition.
    """
    wanted = tuple(got[j : j + MATCH])
    for step in range(1, max(len(known) - i, i) + 1):
        for shift in (step, -step):
            begin = i + shift
            if 0 <= begin < len(known) and tuple(known[begin : begin + len(wanted)]) == wanted:
                return shift
    return None
