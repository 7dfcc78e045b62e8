"""The `timings` of an answer, which requests ask for with `"timings": true`. Pure.

The gateway measures the times, so the prefill time includes the wait in the engine's own queue.
"""

from typing import Any

from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState


def timings(state: GenerationState) -> dict[str, Any]:
    """Returns times in seconds and rates in tokens per second, over all choices of the request.

    `queue_s` lasts from the arrival of the request, tokenization included, until its first sequence is sent to an
    engine, `prefill_s` from then to the first token, `decode_s` from the first token to the last one. The
    `cached_tokens` were not computed and do not count in the prefill rate. A rate is null if nothing was measured: no
    time, or only one token for each choice.
    """
    accumulator, first_s, last_s = state.accumulator, state.time_to_first_token_s, state.time_to_last_token_s
    queue_s = min(state.generation.times.placed_s or 0.0, first_s)
    prefill_s, decode_s = first_s - queue_s, last_s - first_s
    computed = state.num_prompt_tokens - accumulator.num_cached_tokens
    generated = [choice.num_tokens for choice in accumulator.choices if choice.num_tokens]
    return {
        "queue_s": queue_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": state.elapsed_s,
        "prompt_tokens": state.num_prompt_tokens,
        "cached_tokens": accumulator.num_cached_tokens,
        "completion_tokens": sum(generated),
        "prefill_tokens_per_s": _rate(computed, prefill_s),
        "decode_tokens_per_s": _rate(sum(generated) - len(generated), decode_s),
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
