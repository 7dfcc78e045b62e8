"""Checks one claim with a model, and says what is proven.

equal      this model, with these parameters, makes exactly these tokens
differs    it makes others, and this machine computes with the same numerics: the receipt is false
refused    the receipt is damaged, signed by somebody else, or not about what is beside it
undecided  nothing is proven: other files, or numerics that this machine does not have
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from antiphon.receipts.checker import CheckedOutput, Checker, ExpectedOutput
from antiphon.receipts.claims import Claim, Keys, check_prompts, output_tokens, prompt_tokens, texts_of
from antiphon.receipts.prompts import PromptRenderer, first_changed
from antiphon.services.engine.worker.configuration import weights_digest
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import model_directory
from antiphon.shared.receipts.document import OutputClaim, Receipt, digest, first_wrong_link, params_of
from antiphon.shared.text.vocabulary import choose_vocabulary

Verdict = Literal["equal", "differs", "refused", "undecided"]
_SEVERITY: tuple[Verdict, ...] = ("equal", "undecided", "differs", "refused")


@dataclass(slots=True, kw_only=True)
class Finding:
    """The result for one receipt. `reason`: a sentence for people; "" if all outputs are equal."""

    verdict: Verdict
    reason: str = ""
    request_id: str = ""
    model: str = ""
    signature: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    notes: list[str] = field(default_factory=list[str])
    """What was not checked."""


class Verifier:
    """Checks receipts with one model, which the constructor loads. `keys`: those that are trusted; None: any.

    Raises SettingsError if the model cannot be loaded.
    """

    def __init__(self, model: str, keys: Keys | None, **settings: object) -> None:
        self._keys = keys
        self.checker = Checker(model, **settings)
        settled, facts = self.checker.settings, self.checker.engine.facts
        self._directory = model_directory(settled)
        self._weights = weights_digest(self._directory)
        self._renderer = PromptRenderer(settled, self.checker.engine.max_model_len, facts.vocab_size)
        self._vocabulary = choose_vocabulary(settled, self._directory, self._directory)

    def close(self) -> None:
        """Frees the model's memory."""
        self.checker.close()

    def verify(self, claim: Claim, request: bytes | None = None) -> Finding:
        """Returns what is proven of a claim. `request`: the body of the request, if it is known."""
        try:
            receipt = claim.receipt(self._keys)
        except ServiceError as error:
            return Finding(verdict="refused", reason=error.message)
        found = Finding(verdict="equal", request_id=receipt.request_id, model=receipt.model.name)
        found.signature = "not checked" if self._keys is None else "valid"
        if self._keys is None:
            found.notes.append("The signature was not checked: give the server's keys with --keys.")
        try:
            prompts = self._prompts(claim, receipt, request, found)
            tokens = output_tokens(claim, receipt)
        except ServiceError as error:
            return _judged(found, "refused", error.message)
        if prompts is None:
            message = "The prompt is not known: give the request with --request, or ask for the receipt with 'full'."
            return _judged(found, "undecided", message)
        if receipt.model.weights != self._weights:
            told = receipt.model.weights or "none"
            message = f"The model's files are others than those of the receipt: {self._weights}, not {told}."
            return _judged(found, "undecided", message)
        self._compute(claim, receipt, prompts, tokens, found)
        return found

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of output tokens, without special tokens."""
        return self._vocabulary.decode(token_ids, skip_special_tokens=True)

    def _prompts(self, claim: Claim, receipt: Receipt, request: bytes | None, found: Finding) -> list[list[int]] | None:
        """Returns the token ids of the prompts; None if they are not known. Raises ServiceError if they are others."""
        prompts = prompt_tokens(claim, receipt)
        if request is None:
            if prompts is not None:
                found.notes.append("Whether the prompt is that of the request was not checked: give it with --request.")
            return prompts
        if claim.answer is not None and claim.answer.get("type") == "message":
            raise SettingsError("--request: bodies of /v1/messages are not rendered: leave it out and use the evidence")
        rendered, converted = self._renderer.rendered(request)
        check_prompts(rendered, receipt, "of the request" + self._why_others(receipt))
        if changed := first_changed(request, converted, params_of(receipt.outputs[0].params)):
            raise ServiceError("invalid_value", f"The parameters are others: {changed}.")
        if begun := max(output.begun for output in receipt.outputs):
            message = f"The receipt says that {begun} tokens of an output were given, and the request gives none."
            raise ServiceError("invalid_value", message)
        return rendered

    def _why_others(self, receipt: Receipt) -> str:
        """Returns what may be the reason if a prompt is another one, as a part of a sentence."""
        own = {"tokenizer": self._renderer.tokenizer_digest, "chat template": self._renderer.template_digest}
        told = {"tokenizer": receipt.model.tokenizer, "chat template": receipt.model.template}
        others = [name for name in own if own[name] != told[name]]
        return f" (this model has another {' and another '.join(others)})" if others else ""

    def _compute(
        self,
        claim: Claim,
        receipt: Receipt,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int] | None],
        found: Finding,
    ) -> None:
        """Runs the model and adds what it says of each output."""
        try:
            expected = [
                ExpectedOutput(
                    prompt_token_ids=prompts[output.prompt],
                    params=params_of(output.params),
                    token_ids=known,
                    num_begun=output.begun,
                )
                for output, known in zip(receipt.outputs, tokens, strict=True)
            ]
        except ServiceError as error:
            _judged(found, "undecided", error.message)
            return
        if begun := max(output.begun for output in receipt.outputs):
            found.notes.append(f"Of an output, {begun} tokens were given: they were not chosen by the model.")
        checked = self.checker.check(expected)
        texts = texts_of(claim.answer) if claim.answer is not None else []
        for index, (output, one) in enumerate(zip(receipt.outputs, checked, strict=True)):
            verdict, told = self._of_output(receipt, output, one, expected[index])
            text = texts[index] if index < len(texts) else None
            prompt = prompts[output.prompt]
            if verdict == "equal" and text is not None and self._has_other_text(output, one, text, prompt):
                verdict, told["reason"] = "differs", "The text of the answer is not that of the tokens."
            found.outputs.append({"index": index, "verdict": verdict, "num_tokens": output.num_tokens, **told})
            _judged(found, verdict, str(told.get("reason", "")))

    def _of_output(
        self, receipt: Receipt, output: OutputClaim, checked: CheckedOutput, expected: ExpectedOutput
    ) -> tuple[Verdict, dict[str, Any]]:
        if checked.error:
            return "undecided", {"reason": checked.error}
        if expected.token_ids is None:
            reason, told = _without_tokens(output, checked)
        else:
            reason, told = self._first_difference(checked, expected.token_ids)
        reason = reason or self._wrong_end(receipt, output, checked)
        if not reason:
            return "equal", told
        if not (why := self._incomparable(receipt, output)):
            return "differs", {"reason": reason, **told}
        if expected.token_ids is not None and output.num_tokens:
            [again] = self.checker.check([expected], forgiving=True)
            told["num_equal"] = again.num_checked - len(again.differences)
            told["num_checked"] = again.num_checked
        return "undecided", {"reason": f"{reason} This does not decide: {why}", **told}

    def _first_difference(self, checked: CheckedOutput, expected: Sequence[int]) -> tuple[str, dict[str, Any]]:
        if not checked.differences:
            return "", {}
        first = checked.differences[0]
        claimed = self._token(expected[first.position])
        computed = None if first.token_id is None else self._token(first.token_id)
        now = "the output ends before it"
        if computed is not None:
            now = f"it should be {computed['token_id']} {computed['text']!r}"
        reason = f"Token {first.position} is {claimed['token_id']} {claimed['text']!r}, and {now}."
        return reason, {"position": first.position, "claimed": claimed, "computed": computed}

    def _token(self, token_id: int) -> dict[str, Any]:
        inside = token_id < self.checker.engine.facts.vocab_size
        return {"token_id": token_id, "text": self._vocabulary.token_text(token_id) if inside else ""}

    def _wrong_end(self, receipt: Receipt, output: OutputClaim, checked: CheckedOutput) -> str:
        """Returns what is wrong with the end of an output whose tokens are right; "" if nothing is."""
        own, told = checked.finish_reason, output.finish_reason
        if told not in ("stop", "length") or own == told:
            return ""
        if told == "stop" and isinstance(output.stop_reason, str) and output.stop_reason in receipt.stop:
            text = self._vocabulary.decode(checked.token_ids, skip_special_tokens=False)
            return (
                ""
                if output.stop_reason in text
                else f"The output does not contain its stop string {output.stop_reason!r}."
            )
        return f"The output ends with {told!r}, and " + ("it would go on." if own is None else f"it should be {own!r}.")

    def _has_other_text(self, output: OutputClaim, checked: CheckedOutput, text: str, prompt: Sequence[int]) -> bool:
        """Whether the text of an answer is not that of its tokens: perhaps after an echo, or cut at a stop string."""
        is_cut = isinstance(output.stop_reason, str)
        echoes = ("", *(self._vocabulary.decode(prompt, skip_special_tokens=skips) for skips in (True, False)))
        for skips in (True, False):
            whole = self._vocabulary.decode(checked.token_ids, skip_special_tokens=skips)
            if any((echo + whole).strip() == text.strip() for echo in echoes):
                return False
            if is_cut and any((echo + whole).startswith(text) for echo in echoes):
                return False
        return True

    def _incomparable(self, receipt: Receipt, output: OutputClaim) -> str:
        """Returns why other tokens here do not prove that the receipt is false; "" if they do."""
        facts = self.checker.engine.facts
        if facts.variant_because:
            return f"on this machine tokens may depend on the batch, because {facts.variant_because}."
        for engine in (receipt.engines[index] for index in output.engines):
            if not engine.numerics:
                return "the receipt does not say with what the tokens were computed."
            if not engine.batch_invariant:
                return f"where they were computed ({engine.numerics}) tokens may depend on the batch."
            if engine.numerics != facts.numerics:
                return f"they were computed with other numerics ({engine.numerics}) than here ({facts.numerics})."
        return ""


def _without_tokens(output: OutputClaim, checked: CheckedOutput) -> tuple[str, dict[str, Any]]:
    """Compares an output that was generated again, because its tokens are not known, by the digests."""
    tokens = checked.token_ids[: output.num_tokens]
    if len(tokens) < output.num_tokens:
        return f"The output has {output.num_tokens} tokens, and it ends after {len(tokens)}.", {"position": len(tokens)}
    if digest(tokens) == output.digest:
        if len(checked.token_ids) > output.num_tokens:
            checked.finish_reason, checked.token_ids = None, tokens
        return "", {}
    link, every = first_wrong_link(output, tokens), output.link_every
    first = (len(output.links) if link is None else link) * every
    last = min(first + every, output.num_tokens) - 1
    return f"A token from {first} to {last} is another one than computed.", {"from": first, "to": last}


def _judged(found: Finding, verdict: Verdict, reason: str) -> Finding:
    """Makes the verdict at least as bad; keeps the first reason of the worst one."""
    if _SEVERITY.index(verdict) > _SEVERITY.index(found.verdict):
        found.verdict, found.reason = verdict, reason
    return found


def directory_of(model: str) -> str:
    """Returns what the command line names as a model in the form that the engine's settings have."""
    return "" if model == "demo" else str(Path(model)) if Path(model).exists() else model
