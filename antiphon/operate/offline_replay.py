"""Runs a recorded request with a model in this process, through `LLM`, and compares the tokens."""

from dataclasses import fields
from typing import Any

from msgspec.structs import asdict

from antiphon import LLM, SamplingParams
from antiphon.shared import limits
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.recorded_request import RecordedContent, first_difference


def replay(content: RecordedContent, model: str) -> dict[str, Any]:
    """Returns the comparison in the form of `POST /v1/replay`.

    Raises SettingsError if the model cannot be loaded, or if `LLM` cannot repeat the request exactly.
    """
    _check(content)
    directory = str(DEMO_DIRECTORY) if model == "demo" else model
    try:
        with LLM(directory, swap_space=0) as llm:
            return _compare(llm, content, directory)
    except ValueError as error:
        raise SettingsError(f"--model: {error}") from error


def _check(content: RecordedContent) -> None:
    params = content.params
    if content.num_images:
        raise SettingsError("the request has images, whose files are not recorded: it cannot run again")
    reasons = {
        "an adapter": bool(content.adapter_version),
        "a beam search": params.beam is not None,
        "a structured output": params.grammar is not None,
        "words that it must not contain": bool(params.bad_words),
        "a budget of reasoning": params.thinking is not None,
        "log probabilities of the prompt": params.prompt_logprobs is not None,
        "an output that begins with given tokens (a fork)": bool(content.begun),
    }
    for reason, applies in reasons.items():
        if applies:
            raise SettingsError(f"--model: a request with {reason} runs again only on a server: leave --model out")


def _compare(llm: LLM, content: RecordedContent, directory: str) -> dict[str, Any]:
    tokens = _tokens(llm, content)
    sequences: list[dict[str, Any]] = []
    for index, (recorded, now) in enumerate(zip(content.sequences, tokens, strict=True)):
        position = first_difference(recorded, now)
        found: dict[str, Any] = {"index": index, "equal": position is None, "num_tokens": len(recorded.token_ids)}
        if position is not None:
            found |= _difference(llm, content, index, position, now)
        sequences.append(found)
    return {
        "object": "request.replay",
        "id": content.request_id,
        "equal": all(one["equal"] for one in sequences),
        "model": {"recorded": content.path, "now": directory},
        "configuration": {"recorded": content.configuration, "now": content.configuration},
        "engines": ["this process"],
        "sequences": sequences,
    }


def _tokens(llm: LLM, content: RecordedContent) -> list[list[int]]:
    """Returns the tokens of each sequence, in the recorded order."""
    wanted = SamplingParams(
        **_params(content),
        n=content.num_sequences,
        stop=content.stop or None,
        include_stop_str_in_output=content.include_stop_str_in_output,
        detokenize=content.detokenize,
        skip_special_tokens=content.skip_special_tokens,
        spaces_between_special_tokens=content.spaces_between_special_tokens,
    )
    prompts = [{"prompt_token_ids": prompt.token_ids} for prompt in content.prompts]
    answers = llm.generate(prompts, wanted, use_tqdm=False)
    failed = next((answer for answer in answers if answer.error_msg), None)
    if failed is not None:
        raise SettingsError(f"--model: {failed.error_msg}")
    outputs = [output for answer in answers for output in sorted(answer.outputs, key=lambda one: one.index)]
    return [list(output.token_ids) for output in outputs]


def _params(content: RecordedContent) -> dict[str, Any]:
    """Returns the recorded parameters as arguments of the offline `SamplingParams`, most of them by their names."""
    params, ends = content.params, content.prompts[0].end_token_ids
    offline = {one.name for one in fields(SamplingParams)}
    found = {name: value for name, value in asdict(params).items() if name in offline}
    # The end tokens of a chat template end the output as stop tokens do, unless all end tokens are ignored or replaced.
    stops = [*params.stop_token_ids, *([] if params.ignore_eos or params.eos_token_ids else ends)]
    changed = {"max_tokens": params.max_tokens or None, "stop_token_ids": stops, "logit_bias": dict(params.logit_bias)}
    return found | changed


def _difference(llm: LLM, content: RecordedContent, index: int, position: int, now: list[int]) -> dict[str, Any]:
    recorded = content.sequences[index].token_ids
    before = [*content.prompts[index // content.num_sequences].token_ids, *recorded[:position]]
    likeliest = SamplingParams(temperature=0, max_tokens=1, logprobs=limits.LOGPROBS_MAX)
    [answer] = llm.generate([{"prompt_token_ids": before}], likeliest, use_tqdm=False)
    [table] = answer.outputs[0].logprobs or [{}]
    sides: list[dict[str, Any] | None] = []
    for tokens in (recorded, now):
        if position >= len(tokens):
            sides.append(None)
            continue
        token_id, known = tokens[position], table.get(tokens[position])
        text = llm.get_tokenizer().decode([token_id])
        sides.append({"token_id": token_id, "text": text, "logprob": None if known is None else known.logprob})
    values = [None if one is None else one["logprob"] for one in sides]
    gap = abs(values[0] - values[1]) if values[0] is not None and values[1] is not None else None
    return {"position": position, "recorded": sides[0], "replayed": sides[1], "logprob_gap": gap}
