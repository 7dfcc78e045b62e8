"""The stream of one sequence: converts its token events to text events. Pure: no bus, no clock.

    TokenEvent -> Sequencer (order) -> Detokenizer (text) -> StopStrings (end) -> TextEvent

The text events depend only on `OpenStream` and the tokens. A stream that is opened again with the tokens so far, on the
same or another detokenizer, therefore continues with exactly the same text. At a stop string, the tokens of the text
event end with the token that completed the stop string; further tokens from the engine are dropped.
"""

from collections.abc import Sequence
from itertools import islice

from antiphon.shared import limits
from antiphon.shared.codec import unpack_floats, unpack_ids
from antiphon.shared.messages import (
    FinishReason,
    OpenStream,
    PositionLogprobs,
    PromptLogprobs,
    TextEvent,
    TokenEvent,
    TokenLogprobs,
    TokenText,
)
from antiphon.shared.text.detokenization.incremental import Detokenizer, start_detokenizer
from antiphon.shared.text.detokenization.sequencer import Sequencer
from antiphon.shared.text.detokenization.stop_strings import StopStrings
from antiphon.shared.text.vocabulary import UnknownTokenError, Vocabulary


class TextStream:
    """The text stream of one sequence. Construction raises UnknownTokenError or DecodeError for invalid token ids.

    `finish_reason` is set when the last text event is made. `stopped`: whether a stop string or invalid tokens ended
    the stream before the engine ended the sequence, so that the engine must be notified.
    """

    __slots__ = (
        "_detokenizer", "_min_tokens", "_pending", "_position", "_stop_reason", "_stops", "_text_length", "_vocabulary",
        "attempt", "finish_reason", "sequence_id", "sequencer", "stopped",
    )  # fmt: skip

    def __init__(self, message: OpenStream, vocabulary: Vocabulary) -> None:
        output = unpack_ids(message.output_token_ids)
        tail = unpack_ids(message.prompt_token_ids)
        if not message.detokenize:
            vocabulary = vocabulary.silent
        self.sequence_id, self.attempt = message.sequence_id, message.attempt
        self.finish_reason: FinishReason | None = None
        self.stopped = False
        self.sequencer = Sequencer(output)
        self._vocabulary = vocabulary
        self._detokenizer: Detokenizer = start_detokenizer(
            vocabulary,
            tail,
            message.skip_special_tokens,
            message.spaces_between_special_tokens,
            message.shown_special_tokens,
        )
        self._stops = StopStrings(message.stop, message.include_stop_str_in_output) if message.stop else None
        self._min_tokens = message.min_tokens
        self._position = 0
        text, self._position, self._stop_reason = self._decode(output, ending=False)
        self._text_length = min(message.text_offset, len(text))
        self._pending = text[message.text_offset :]

    @property
    def finished(self) -> bool:
        """Whether the last text event has been made."""
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Number of output tokens that belong to the text, including those that the owner sent in `OpenStream`."""
        return self._position

    @property
    def gap(self) -> int | None:
        """The position of the first missing token; None if no tokens are missing or the stream has finished."""
        return self.sequencer.position if self.sequencer.has_gap and not self.finished else None

    def push(self, event: TokenEvent) -> list[TextEvent]:
        """Returns the text events that follow from a token event. An invalid token id ends the stream with an error."""
        if self.finished:
            return []
        if self._stop_reason is not None:  # the tokens in `OpenStream` already contain a stop string
            return [self._last("stop", "", stop=self._stop_reason)]
        texts: list[TextEvent] = []
        try:
            if event.prompt_logprobs is not None:
                return [self._of_prompt(event.position, event.prompt_logprobs)]
            for fresh, skip in self.sequencer.push(event):
                self._take(fresh, skip, texts)
                if self.finished:
                    break
        except (UnknownTokenError, OverflowError):
            texts.append(self.fail("engine_failure", "The engine sent token ids that the tokenizer does not know."))
        return texts

    def fail(self, code: str, message: str) -> TextEvent:
        """Ends the stream with an error. Returns the last text event, which has the text that was held back."""
        text = self._stops.finish() if self._stops else ""
        return self._last("error", text, code=code, message=message)

    def _last(
        self, reason: FinishReason, text: str, *, stop: str | None = None, code: str = "", message: str = ""
    ) -> TextEvent:
        """Ends the stream before the engine does. Returns the last text event, which has no tokens."""
        self.finish_reason, self.stopped = reason, True
        offset, text = self._show(text)
        return TextEvent(
            sequence_id=self.sequence_id,
            attempt=self.attempt,
            position=self._position,
            token_ids=(),
            text_offset=offset,
            text=text,
            finish_reason=reason,
            stop_reason=stop,
            error_code=code,
            error_message=message,
        )

    def _take(self, event: TokenEvent, skip: int, texts: list[TextEvent]) -> None:
        end = len(event.token_ids)
        while end - skip > limits.STREAM_EVENT_TOKENS_MAX and not self.finished:
            texts.append(self._take_range(event, skip, skip + limits.STREAM_EVENT_TOKENS_MAX))
            skip += limits.STREAM_EVENT_TOKENS_MAX
        if not self.finished:
            texts.append(self._take_range(event, skip, end))

    def _take_range(self, event: TokenEvent, start: int, end: int) -> TextEvent:
        """Returns the text event of the tokens [start, end) of a token event.

        The token event's finish reason applies only if the range includes its last token.
        """
        reason = event.finish_reason if end == len(event.token_ids) else None
        text, used, stop = self._decode(event.token_ids[start:end], ending=reason is not None)
        stop_reason: str | int | None = event.stop_token_id if reason is not None else None
        if stop is not None:
            self.stopped = reason is None or used < end - start
            reason, stop_reason, end = "stop", stop, start + used
        self.finish_reason = reason
        position, self._position = self._position, self._position + used
        offset, text = self._show(text)
        return TextEvent(
            sequence_id=self.sequence_id,
            attempt=self.attempt,
            position=position,
            token_ids=event.token_ids[start:end],
            text_offset=offset,
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=self._logprobs(event, start, end) if event.logprobs else (),
            num_cached_tokens=event.num_cached_tokens,
            cumulative_logprob=event.cumulative_logprob - _logprob_sum(event.logprobs[end:]),
            error_code=event.error_code if reason == "error" else "",
            error_message=event.error_message if reason == "error" else "",
        )

    def _decode(self, token_ids: Sequence[int], ending: bool) -> tuple[str, int, str | None]:
        """Returns the text, the number of tokens that belong to it, and the stop string that ended the text or None."""
        if self._stops is not None:
            return self._decode_to_stop(self._stops, token_ids, ending)
        text = self._detokenizer.push(token_ids)
        return (text + self._detokenizer.finish() if ending else text), len(token_ids), None

    def _decode_to_stop(
        self, stops: StopStrings, token_ids: Sequence[int], ending: bool
    ) -> tuple[str, int, str | None]:
        parts: list[str] = []
        num_exempt = self._min_tokens - self._position
        # All tokens are decoded before any text goes to `stops`: if an unknown token raises an error, no text is lost.
        deltas = [self._detokenizer.push((token_id,)) for token_id in token_ids]
        for used, delta in enumerate(deltas, start=1):
            text, stop = stops.push(delta, used > num_exempt)
            parts.append(text)
            if stop is not None:
                return "".join(parts), used, stop
        if not ending:
            return "".join(parts), len(token_ids), None
        text, stop = stops.push(self._detokenizer.finish(), len(token_ids) > num_exempt)
        parts += (text, stops.finish())
        return "".join(parts), len(token_ids), stop

    def _show(self, text: str) -> tuple[int, str]:
        """Returns the offset of the next text event, and `text` with any pending text of the replay before it."""
        if self._pending:
            text, self._pending = self._pending + text, ""
        offset = self._text_length
        self._text_length += len(text)
        return offset, text

    def _of_prompt(self, position: int, part: PromptLogprobs) -> TextEvent:
        """Returns the text event of a part of the prompt's log probabilities."""
        token_ids, logprobs = unpack_ids(part.token_ids), unpack_floats(part.logprobs)
        top_token_ids, top_logprobs = unpack_ids(part.top_token_ids), unpack_floats(part.top_logprobs)
        found: list[PositionLogprobs] = []
        ranks = unpack_ids(part.ranks) or [0] * len(token_ids)
        for index, (token_id, logprob, rank) in enumerate(zip(token_ids, logprobs, ranks, strict=True)):
            own = slice(index * part.num_top, (index + 1) * part.num_top)
            top = zip(top_token_ids[own], top_logprobs[own], strict=True)
            chosen = self._token_text(token_id, logprob)
            found.append(PositionLogprobs(chosen, tuple([self._token_text(*candidate) for candidate in top]), rank))
        return TextEvent(
            sequence_id=self.sequence_id,
            attempt=self.attempt,
            position=position,
            token_ids=(),
            text_offset=self._text_length,
            text="",
            prompt_start=part.start,
            prompt_logprobs=tuple(found),
        )

    def _logprobs(self, event: TokenEvent, start: int, end: int) -> tuple[PositionLogprobs, ...]:
        pairs = zip(event.token_ids[start:end], islice(event.logprobs, start, end), strict=False)
        return tuple([self._position_logprobs(token_id, logprobs) for token_id, logprobs in pairs])

    def _position_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> PositionLogprobs:
        chosen = self._token_text(token_id, logprobs.logprob)
        return PositionLogprobs(chosen, tuple([self._token_text(top.token_id, top.logprob) for top in logprobs.top]))

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        vocabulary = self._vocabulary
        return TokenText(token_id, vocabulary.token_text(token_id), vocabulary.token_bytes[token_id], logprob)


def _logprob_sum(logprobs: Sequence[TokenLogprobs]) -> float:
    return sum(item.logprob for item in logprobs)
