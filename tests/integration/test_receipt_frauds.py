"""Servers that lie about what they compute are caught at their first false token, and honest ones never."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from antiphon.receipts.checker import Checker, ExpectedOutput
from antiphon.receipts.claims import Claim
from antiphon.receipts.sampling import chosen, verify_sample
from antiphon.receipts.verdict import Finding, Verifier
from antiphon.services.engine.worker.configuration import weights_digest
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import FinishReason
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.receipts import document, signing
from antiphon.shared.receipts.document import EngineClaim, Evidence, ModelClaim, OutputClaim, PromptClaim, Receipt
from tests.models import EOS_TOKEN_ID, make_model
from tests.support.slow import slow_but

KEY = signing.SigningKey.of(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
KEYS = signing.public_keys(signing.published([KEY]))
PROMPT = [*range(20, 45)]
SETTINGS: dict[str, object] = {"kv_cache_memory_gb": 0.05, "threads": 1, "block_size": 16}
WARM = SamplingParams(max_tokens=150, temperature=0.8, seed=77, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
FIELDS = '"a":{"type":"string","maxLength":9},"b":{"type":"integer"}'
SCHEMA = f'{{"type":"object","properties":{{{FIELDS}}},"required":["a","b"]}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module")
def verifier(model: Path) -> Iterator[Verifier]:
    made = Verifier(str(model), KEYS, **SETTINGS)
    yield made
    made.close()


def generated(checker: Checker, params: SamplingParams) -> tuple[list[int], FinishReason]:
    [output] = checker.check([ExpectedOutput(prompt_token_ids=PROMPT, params=params, token_ids=None)])
    assert output.finish_reason is not None
    return output.token_ids, output.finish_reason


def honest_engine(verifier: Verifier) -> EngineClaim:
    facts = verifier.checker.engine.facts
    return EngineClaim(
        numerics=facts.numerics, configuration=facts.configuration, content=facts.content, batch_invariant=True
    )


def receipt_of(
    model: Path, engine: EngineClaim, tokens: list[int], params: SamplingParams, reason: FinishReason, **more: Any
) -> Receipt:
    every = document.link_every(len(tokens))
    output = OutputClaim(
        params=document.told_params(params), num_tokens=len(tokens), digest=document.digest(tokens), link_every=every,
        links=document.links(tokens, every), finish_reason=reason, engines=[0], **more,
    )  # fmt: skip
    return Receipt(
        version=1, request_id="r", created=1, model=ModelClaim(name="m", weights=weights_digest(model)),
        engines=[engine], prompts=[PromptClaim(document.digest(PROMPT), len(PROMPT))], outputs=[output],
    )  # fmt: skip


def signed(receipt: Receipt, tokens: list[int] | None, answer: dict[str, Any] | None = None) -> Claim:
    evidence = Evidence([PROMPT], [tokens]) if tokens is not None else None
    return Claim(KEY.sign(document.encode(receipt)), evidence, answer)


def verified(
    verifier: Verifier, model: Path, tokens: list[int], params: SamplingParams, reason: FinishReason, **more: Any
) -> Finding:
    return verifier.verify(signed(receipt_of(model, honest_engine(verifier), tokens, params, reason, **more), tokens))


def first_false(tokens: list[int], right: list[int]) -> int:
    return next(index for index, (one, other) in enumerate(zip(tokens, right, strict=False)) if one != other)


KINDS = {
    "greedy": GREEDY,
    "sampled": WARM,
    "truncated": msgspec.structs.replace(WARM, top_k=7, top_p=0.9, min_p=0.05),
    "penalties": msgspec.structs.replace(WARM, presence_penalty=0.7, frequency_penalty=1.1, repetition_penalty=1.3),
    "biased": msgspec.structs.replace(WARM, logit_bias=((70, 8.0), (80, -100.0)), bad_words=((70, 70), (71,))),
    "allowed": msgspec.structs.replace(WARM, allowed_token_ids=tuple(range(60, 90))),
    "grammar": msgspec.structs.replace(WARM, grammar=Grammar("json", SCHEMA), ignore_eos=False),
    "ended": msgspec.structs.replace(WARM, ignore_eos=False, logit_bias=((EOS_TOKEN_ID, 7.0),), min_tokens=20),
}


@pytest.mark.parametrize("kind", slow_but(("greedy", "penalties", "grammar"), KINDS))
def test_an_honest_output_is_equal_and_takes_few_steps(kind: str, verifier: Verifier, model: Path) -> None:
    params, core = KINDS[kind], verifier.checker.engine
    before = core.counters().step
    tokens, reason = generated(verifier.checker, params)
    took = core.counters().step - before
    found = verified(verifier, model, tokens, params, reason)
    assert found.verdict == "equal", found
    assert core.counters().step - before - took < max(6, took / 6)
    # A false token is found where it is, whatever the parameters.
    place = len(tokens) // 2
    wrong = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    found = verified(verifier, model, wrong, params, reason)
    assert (found.verdict, found.outputs[0]["position"]) == ("differs", place)
    assert found.outputs[0]["computed"]["token_id"] == tokens[place]
    assert f"Token {place} is {wrong[place]}" in found.reason


def flipped(model: Path, directory: Path) -> Path:
    """A copy of a model with one bit changed: in the middle of its file, in the exponent of one weight."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    place = len(data) // 2 | 1
    data[place] ^= 0x20
    file.write_bytes(data)
    return directory


@pytest.fixture(scope="module")
def other_outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What servers compute that are not what they say."""
    made: dict[str, list[int]] = {}
    changed = flipped(model, tmp_path_factory.mktemp("flipped") / "model")
    for name, path, more in (("flipped", changed, {}), ("int8", model, {"quantization": "weight_only_int8"})):
        checker = Checker(str(path), **SETTINGS, **more)
        made[name] = generated(checker, WARM)[0]
        checker.close()
    return made


@pytest.mark.parametrize("fraud", ["flipped", "int8"])
def test_other_weights_are_caught_at_their_first_false_token(
    fraud: str, other_outputs: dict[str, list[int]], verifier: Verifier, model: Path
) -> None:
    right, _ = generated(verifier.checker, WARM)
    tokens = other_outputs[fraud]
    place = first_false(tokens, right)
    found = verified(verifier, model, tokens, WARM, "length")
    assert (found.verdict, found.outputs[0]["position"]) == ("differs", place)
    assert found.outputs[0]["claimed"]["token_id"] == tokens[place]
    assert found.outputs[0]["computed"]["token_id"] == right[place]


def test_another_seed_than_the_receipt_says_is_caught_at_the_first_false_token(verifier: Verifier, model: Path) -> None:
    other = msgspec.structs.replace(WARM, seed=78)
    tokens, reason = generated(verifier.checker, other)
    right, _ = generated(verifier.checker, WARM)
    found = verified(verifier, model, tokens, WARM, reason)
    assert (found.verdict, found.outputs[0]["position"]) == ("differs", first_false(tokens, right))
    assert verified(verifier, model, tokens, other, reason).verdict == "equal"


def test_an_output_that_was_cut_or_made_longer_is_caught(verifier: Verifier, model: Path) -> None:
    params = KINDS["ended"]
    tokens, reason = generated(verifier.checker, params)
    assert reason == "stop"
    cut = verified(verifier, model, tokens[:-1], params, "stop")
    assert cut.verdict == "differs"
    assert "it would go on" in cut.reason
    longer = verified(verifier, model, [*tokens, 50], params, "stop")
    assert (longer.verdict, longer.outputs[0]["position"]) == ("differs", len(tokens))
    assert "ends before it" in longer.reason
    early = verified(verifier, model, tokens[:30], msgspec.structs.replace(params, max_tokens=150), "length")
    assert early.verdict == "differs"


def test_without_the_tokens_the_output_is_computed_again_and_compared_by_its_digests(
    verifier: Verifier, model: Path
) -> None:
    tokens, reason = generated(verifier.checker, WARM)

    def found_for(told: list[int]) -> Finding:
        receipt = receipt_of(model, honest_engine(verifier), told, WARM, reason)
        claim = Claim(KEY.sign(document.encode(receipt)), Evidence([PROMPT], []))
        return verifier.verify(replace(claim, evidence=None, answer=None), completion_body(PROMPT))

    assert found_for(tokens).verdict == "equal"
    wrong = found_for([*tokens[:70], tokens[70] + 1, *tokens[71:]])
    assert wrong.verdict == "differs"
    assert (wrong.outputs[0]["from"], wrong.outputs[0]["to"]) == (64, 127)


def completion_body(prompt: list[int], **fields: Any) -> bytes:
    return msgspec.json.encode({"prompt": prompt, "max_tokens": 150, "ignore_eos": True, **fields})


def test_a_request_with_another_prompt_or_other_parameters_is_refused(verifier: Verifier, model: Path) -> None:
    tokens, reason = generated(verifier.checker, WARM)
    claim = signed(receipt_of(model, honest_engine(verifier), tokens, WARM, reason), tokens)
    assert verifier.verify(claim, completion_body(PROMPT, temperature=0.8, seed=77)).verdict == "equal"
    other = verifier.verify(claim, completion_body(PROMPT[1:]))
    assert other.verdict == "refused"
    assert "24 tokens) is not the one" in other.reason
    hotter = verifier.verify(claim, completion_body(PROMPT, temperature=0.9))
    assert hotter.verdict == "refused"
    assert "asks for temperature 0.9, and the receipt says 0.8" in hotter.reason
    with pytest.raises(SettingsError, match="use the evidence"):
        verifier.verify(claim, b'{"input": "hello"}')


def test_evidence_that_is_not_what_was_signed_is_refused(verifier: Verifier, model: Path) -> None:
    tokens, reason = generated(verifier.checker, WARM)
    receipt = receipt_of(model, honest_engine(verifier), tokens, WARM, reason)
    claim = signed(receipt, tokens)
    assert claim.evidence is not None
    for evidence in (Evidence([PROMPT], [tokens[1:]]), Evidence([PROMPT[1:]], [tokens]), Evidence([], [tokens])):
        found = verifier.verify(replace(claim, evidence=evidence))
        assert found.verdict == "refused", evidence
        assert found.reason


def test_a_text_that_is_not_that_of_the_tokens_is_caught(verifier: Verifier, model: Path) -> None:
    tokens, reason = generated(verifier.checker, GREEDY)
    receipt = receipt_of(model, honest_engine(verifier), tokens, GREEDY, reason)
    text = verifier.text_of(tokens)
    for answer, verdict in ((text, "equal"), ("A lie. " + text, "differs"), (text[:-3], "differs")):
        found = verifier.verify(signed(receipt, tokens, {"choices": [{"index": 0, "text": answer}]}))
        assert found.verdict == verdict, answer


def test_tokens_that_the_request_gave_are_not_held_against_the_server(verifier: Verifier, model: Path) -> None:
    begun = [200, 201, 202, 203]
    [rest] = verifier.checker.check([
        ExpectedOutput(prompt_token_ids=[*PROMPT, *begun], params=GREEDY, token_ids=None)
    ])  # fmt: skip
    tokens = [*begun, *rest.token_ids[:100]]
    params = msgspec.structs.replace(GREEDY, max_tokens=len(tokens))
    assert verified(verifier, model, tokens, params, "length", begun=4).verdict == "equal"
    assert verified(verifier, model, tokens, params, "length").verdict == "differs"
    claim = signed(receipt_of(model, honest_engine(verifier), tokens, params, "length", begun=4), tokens)
    found = verifier.verify(claim, completion_body(PROMPT, temperature=0.0))
    assert found.verdict == "refused"
    assert "the request gives none" in found.reason


def test_tokens_and_parameters_that_the_model_does_not_have_are_not_computed(verifier: Verifier, model: Path) -> None:
    tokens, reason = generated(verifier.checker, WARM)
    far = [*tokens[:50], 2**31, *tokens[51:]]
    found = verified(verifier, model, far, WARM, reason)
    assert (found.verdict, found.outputs[0]["position"]) == ("differs", 50)
    unknown = msgspec.structs.replace(honest_engine(verifier), numerics="unknown")
    found = verifier.verify(signed(receipt_of(model, unknown, far, WARM, reason), far))
    assert (found.verdict, found.outputs[0]["num_checked"]) == ("undecided", 51)
    hot = msgspec.structs.replace(WARM, temperature=1e30, logit_bias=((10**6, 1.0),))
    for params in (hot, msgspec.structs.replace(hot, temperature=1.0)):
        found = verified(verifier, model, tokens, params, reason)
        assert found.verdict == "undecided"
        assert "temperature" in found.reason or "logit_bias" in found.reason
    [output] = verifier.checker.check([ExpectedOutput(prompt_token_ids=[10**6], params=WARM, token_ids=tokens)])
    assert "outside the vocabulary" in output.error


def test_other_files_and_other_numerics_decide_nothing(verifier: Verifier, model: Path, tmp_path: Path) -> None:
    tokens, reason = generated(verifier.checker, WARM)
    honest = honest_engine(verifier)
    receipt = receipt_of(model, honest, tokens, WARM, reason)
    other = msgspec.structs.replace(receipt, model=ModelClaim(name="m", weights="0" * 16))
    found = verifier.verify(signed(other, tokens))
    assert (found.verdict, found.outputs) == ("undecided", [])
    wrong = [*tokens[:40], tokens[40] + 1, *tokens[41:]]
    for engine, why in (
        (msgspec.structs.replace(honest, numerics="triton H200"), "other numerics (triton H200)"),
        (msgspec.structs.replace(honest, batch_invariant=False), "may depend on the batch"),
        (EngineClaim(), "does not say with what"),
    ):
        assert verifier.verify(signed(receipt_of(model, engine, tokens, WARM, reason), tokens)).verdict == "equal"
        found = verifier.verify(signed(receipt_of(model, engine, wrong, WARM, reason), wrong))
        assert found.verdict == "undecided"
        assert why in found.reason
        [output] = found.outputs
        assert output["position"] == 40
        # Each token is compared after the claimed ones before it, so that one difference does not hide the rest.
        assert 1 <= output["num_checked"] - output["num_equal"] < 110


def test_a_sample_is_drawn_from_the_seed_and_checked_with_one_model(
    verifier: Verifier, model: Path, tmp_path: Path
) -> None:
    tokens, reason = generated(verifier.checker, GREEDY)
    wrong = [*tokens[:9], tokens[9] + 1, *tokens[10:]]
    lines: list[bytes] = []
    for number in range(1, 41):
        told = wrong if number == 7 else tokens
        claim = signed(receipt_of(model, honest_engine(verifier), told, GREEDY, reason), told)
        lines.append(msgspec.json.encode({"antiphon_receipt": claim.token, "antiphon_evidence": claim.evidence}))
    lines[11] = b'{"id": "without"}'
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"\n".join(lines))
    seed = next(one for one in range(1000) if chosen(one, 7, 0.2) and chosen(one, 12, 0.2))
    found: dict[int, Finding] = {}
    counts = verify_sample(verifier, str(path), 0.2, seed, found.__setitem__)
    assert set(found) == {number for number in range(1, 41) if chosen(seed, number, 0.2)}
    assert (found[7].verdict, found[12].verdict) == ("differs", "refused")
    assert counts == {"differs": 1, "refused": 1, "equal": len(found) - 2, "skipped": 40 - len(found)}
    assert 2 < sum(chosen(seed, number, 0.01) for number in range(1000)) < 25
