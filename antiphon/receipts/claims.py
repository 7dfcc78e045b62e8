"""Reads receipts out of files, which have an answer, the events of a stream or a receipt alone, and key sets."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.receipts.document import EVIDENCE, MEMBER, Evidence, Receipt, decode, decode_evidence, digest
from antiphon.shared.receipts.signing import public_keys, verified

KEYS_PATH = "/.well-known/antiphon-keys"
_TIMEOUT_S = 10.0
_KEYS_BYTES_MAX = 2**20
Keys = dict[str, Ed25519PublicKey]


@dataclass(frozen=True, slots=True)
class Claim:
    """A signed receipt and what came with it. `answer`: the whole answer; None: it was a stream or a receipt alone."""

    token: str
    evidence: Evidence | None = None
    answer: dict[str, Any] | None = None

    def receipt(self, keys: Keys | None) -> Receipt:
        """Returns the receipt. Raises ServiceError with the reason for which it is refused; `keys`: see `verified`."""
        payload, _ = verified(self.token, keys)
        return decode(payload)

    def beside(self, answer: bytes) -> "Claim":
        """Returns the claim with an answer that was in another file, and its evidence. Raises ServiceError."""
        found = _object(answer.decode(errors="replace"))
        evidence = _evidence_in(found)
        return Claim(self.token, self.evidence if evidence is None else evidence, found)


def read_file(path: str, what: str) -> bytes:
    """Returns the content of a file that the command line names. Raises SettingsError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(limits.RECEIPT_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"{what}: {path}: {error.strerror}") from error
    if len(data) > limits.RECEIPT_BYTES_MAX:
        raise SettingsError(f"{what}: {path} has more than {limits.RECEIPT_BYTES_MAX} bytes")
    return data


def claim_of(data: bytes) -> Claim:
    """Returns the claim in an answer, in the events of a stream, or in a receipt alone. Raises ServiceError."""
    text = data.decode(errors="replace").strip()
    if text.startswith("{"):
        return _in_object(_object(text))
    if text.startswith(("data:", "event:", "id:", ":")):
        return _in_stream(text)
    if not text or any(character.isspace() for character in text):
        raise _none("it is neither an answer, nor a stream, nor a receipt")
    return Claim(text)


def _in_object(found: dict[str, Any]) -> Claim:
    token = found.get(MEMBER)
    if not isinstance(token, str):
        raise _none(f"the answer has no member '{MEMBER}': ask for it with the header 'X-Antiphon-Receipt: full'")
    return Claim(token, _evidence_in(found), found)


def _evidence_in(found: dict[str, Any]) -> Evidence | None:
    return decode_evidence(json.dumps(found[EVIDENCE]).encode()) if EVIDENCE in found else None


def _in_stream(text: str) -> Claim:
    for line in text.splitlines():
        if line.startswith("data:") and f'"{MEMBER}"' in line:
            claim = _in_object(_object(line.removeprefix("data:").strip()))
            return Claim(claim.token, claim.evidence)
    raise _none("none of the events has a receipt: the stream may be truncated")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _none(f"its JSON is damaged or truncated: {error}") from error
    if not isinstance(found, dict):
        raise _none("it is no JSON object")
    return cast(dict[str, Any], found)


def _none(why: str) -> ServiceError:
    return ServiceError("invalid_value", f"There is no receipt: {why}.")


def read_keys(source: str) -> Keys:
    """Returns the public keys of a file, or of a URL: that of a key set, or of a server. Raises SettingsError."""
    try:
        if source.startswith(("http://", "https://")):
            return public_keys(_fetched(source))
        return public_keys(read_file(source, "--keys"))
    except ServiceError as error:
        raise SettingsError(f"--keys: {source}: {error.message}") from error


def _fetched(url: str) -> bytes:
    parts = urllib.parse.urlsplit(url)
    if parts.path in ("", "/"):
        url = urllib.parse.urlunsplit(parts._replace(path=KEYS_PATH))
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return answer.read(_KEYS_BYTES_MAX)
    except OSError as error:
        raise SettingsError(f"--keys: {url}: {error}") from error


def output_tokens(claim: Claim, receipt: Receipt) -> list[list[int] | None]:
    """Returns the token ids of each output: of the evidence or, if there is none, those in the answer; None: unknown.

    Raises ServiceError if they are not those that the receipt is about.
    """
    found: list[list[int] | None] = [*claim.evidence.outputs] if claim.evidence is not None else _answered(claim.answer)
    if not found:
        found = [None] * len(receipt.outputs)
    if len(found) != len(receipt.outputs):
        raise ServiceError(
            "invalid_value", f"There are {len(found)} outputs beside a receipt of {len(receipt.outputs)}."
        )
    for index, (tokens, output) in enumerate(zip(found, receipt.outputs, strict=True)):
        if tokens is not None and _digest(tokens) != output.digest:
            message = f"The token ids of output {index} beside the receipt are not those that it is about."
            raise ServiceError("invalid_value", message)
    return found


def prompt_tokens(claim: Claim, receipt: Receipt) -> list[list[int]] | None:
    """Returns the token ids of each prompt in the evidence; None without evidence. Raises as `output_tokens`."""
    if claim.evidence is None:
        return None
    check_prompts(claim.evidence.prompts, receipt, "in the evidence")
    return claim.evidence.prompts


def check_prompts(prompts: list[list[int]], receipt: Receipt, where: str) -> None:
    """Raises ServiceError if these are not the prompts that the receipt is about."""
    if len(prompts) != len(receipt.prompts):
        message = f"There are {len(prompts)} prompts {where}; the receipt is about {len(receipt.prompts)}."
        raise ServiceError("invalid_value", message)
    for index, (tokens, told) in enumerate(zip(prompts, receipt.prompts, strict=True)):
        if _digest(tokens) != told.digest:
            message = f"The prompt {index} {where} ({len(tokens)} tokens) is not the one that the receipt is about "
            raise ServiceError("invalid_value", message + f"({told.num_tokens} tokens).")


def _digest(tokens: list[int]) -> str:
    return digest(tokens) if all(0 <= one < 2**32 for one in tokens) else ""


def _answered(answer: dict[str, Any] | None) -> list[list[int] | None]:
    """Returns the `token_ids` of the choices of an answer; [] if it has none."""
    choices = (answer or {}).get("choices")
    if not isinstance(choices, list):
        return []
    found = [one.get("token_ids") for one in cast(list[dict[str, Any]], choices)]
    try:
        return msgspec.convert(found, list[list[int] | None]) if any(found) else []
    except msgspec.ValidationError as error:
        raise ServiceError("invalid_value", f"The token ids of the answer cannot be read: {error}.") from error


def texts_of(answer: dict[str, Any]) -> list[str | None]:
    """Returns the text of each choice of an answer; None where it is separated from other parts of the output."""
    if answer.get("type") == "message" or not isinstance(answer.get("choices"), list):
        return []
    return [*_texts(cast(list[dict[str, Any]], answer["choices"]))]


def _texts(choices: list[dict[str, Any]]) -> Iterator[str | None]:
    for choice in choices:
        message = choice.get("message")
        if not isinstance(message, dict):
            text = choice.get("text")
        else:
            parts = cast(dict[str, Any], message)
            separated = any(
                parts.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "reasoning")
            )
            text = None if separated else parts.get("content")
        yield text if isinstance(text, str) else None
