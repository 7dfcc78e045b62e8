"""Receipts: their bytes and signatures are what the documentation says, and what was changed is refused."""

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.parameters.thinking import ThinkingBudget
from antiphon.shared.receipts import document, signing
from antiphon.shared.receipts.document import LINKS_MAX, OutputClaim, Receipt

ROOT = Path(__file__).resolve().parents[3]
VECTOR: dict[str, Any] = json.loads((ROOT / "docs/reference/receipt-vector.json").read_text())
KEY = signing.SigningKey.of(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
KEYS = signing.public_keys(signing.published([KEY]))


def test_the_vector_of_the_documentation_is_what_the_code_makes() -> None:
    assert msgspec.json.decode(msgspec.json.encode(KEY.jwk(private=True))) == VECTOR["private_key"]
    receipt = document.decode(VECTOR["payload"].encode())
    assert document.encode(receipt).decode() == VECTOR["payload"]
    assert KEY.sign(document.encode(receipt)) == VECTOR["receipt"]
    assert signing.verified(VECTOR["receipt"], KEYS) == (VECTOR["payload"].encode(), KEY.kid)
    assert receipt.prompts[0].digest == document.digest(VECTOR["prompt_token_ids"])
    [output] = receipt.outputs
    assert output.digest == document.digest(VECTOR["output_token_ids"])
    assert output.links == document.links(VECTOR["output_token_ids"], output.link_every)


def test_a_digest_is_that_of_little_endian_ids_and_a_link_that_of_a_beginning() -> None:
    assert document.digest([1, 258]) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 1, 0, 0])).hexdigest()
    tokens = list(range(150))
    assert document.links(tokens, 64) == [document.digest(tokens[:64]), document.digest(tokens[:128])]


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 4096, 4200, 131072, 999_999])
def test_a_receipt_stays_small_however_long_the_output_is(num_tokens: int) -> None:
    every = document.link_every(num_tokens)
    assert every % document.LINK_TOKENS == 0
    assert num_tokens // every <= LINKS_MAX
    assert num_tokens // every > LINKS_MAX // 2 - 1 or every == document.LINK_TOKENS


def claim_of(tokens: list[int]) -> OutputClaim:
    every = document.link_every(len(tokens))
    return OutputClaim(
        params={}, num_tokens=len(tokens), digest=document.digest(tokens), link_every=every,
        links=document.links(tokens, every), finish_reason="length", engines=[0],
    )  # fmt: skip


def test_links_tell_where_the_first_difference_is() -> None:
    tokens = list(range(300))
    output = claim_of(tokens)
    assert document.first_wrong_link(output, tokens) is None
    assert document.first_wrong_link(output, [*tokens[:130], 7, *tokens[131:]]) == 2
    assert document.first_wrong_link(output, [*tokens[:299], 7]) is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, seed=-5, max_tokens=7),
        SamplingParams(stop_token_ids=(3, 4), end_token_ids=(9,), ignore_eos=True, min_tokens=2, top_k=4, top_a=0.25),
        SamplingParams(logit_bias=((3, 1.5), (9, -100.0)), allowed_token_ids=(1, 2), bad_words=((1, 2), (3,))),
        SamplingParams(grammar=Grammar("json", '{"type":"object"}', compact=True)),
        SamplingParams(thinking=ThinkingBudget(budget=4, opening=(1,), closing=(2,))),
    ],
)
def test_parameters_that_choose_tokens_come_back_as_they_were(params: SamplingParams) -> None:
    told = json.loads(json.dumps(document.told_params(params)))
    assert document.params_of(told) == params


def test_parameters_that_only_report_are_left_out_and_unknown_ones_are_refused() -> None:
    assert document.told_params(SamplingParams(logprobs=3, prompt_logprobs=1, seed=5)) == {"seed": 5}
    with pytest.raises(ServiceError, match="does not know: mood"):
        document.params_of({"mood": 1})
    with pytest.raises(ServiceError, match="cannot be read"):
        document.params_of({"temperature": "hot"})


def changed_payload(text: str, old: str, new: str) -> str:
    head, payload, signature = text.split(".")
    data = signing.decode_base64(payload).decode()
    assert old in data
    return f"{head}.{signing.encode_base64(data.replace(old, new).encode())}.{signature}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: changed_payload(one, '"seed":42', '"seed":43'), "was changed"),
        (lambda one: one[:-8], "was changed or truncated"),
        (lambda one: one[: one.rindex(".")], "2 of 3 parts"),
        (lambda one: one[:60], "1 of 3 parts"),
        (lambda one: "!" + one, "damaged"),
        (lambda one: "e30" + one[one.index(".") :], "no receipt"),
        (lambda one: signing.encode_base64(b'{"alg":"none"}') + one[one.index(".") :], "no receipt"),
    ],
)  # fmt: skip
def test_what_was_changed_or_cut_is_refused_with_the_reason(change: Any, reason: str) -> None:
    with pytest.raises(ServiceError, match=reason):
        signing.verified(change(VECTOR["receipt"]), KEYS)


def test_a_receipt_of_another_key_is_refused_even_if_it_claims_the_id_of_a_trusted_one() -> None:
    other = signing.SigningKey.of(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    payload = VECTOR["payload"].encode()
    with pytest.raises(ServiceError, match="not trusted"):
        signing.verified(other.sign(payload), KEYS)
    with pytest.raises(ServiceError, match="another key has signed"):
        signing.verified(signing.SigningKey(other.private, KEY.kid).sign(payload), KEYS)
    renamed = msgspec.json.encode({"keys": [{**msgspec.to_builtins(other.jwk()), "kid": KEY.kid}]})
    assert set(signing.public_keys(renamed)) == {other.kid}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"version":1}', '"version":2}', "version 2"),
        ('"engines":[0]', '"engines":[1]', "contradicts itself"),
        ('"link_every":64', '"link_every":0', "contradicts itself"),
        ('"link_every":64', '"link_every":32', "contradicts itself"),
        ('"num_tokens":130', '"num_tokens":"many"', "cannot be read"),
        ('"outputs":[', '"others":[', "cannot be read"),
    ],
)
def test_a_signed_receipt_that_makes_no_sense_is_refused(old: str, new: str, reason: str) -> None:
    text = VECTOR["payload"]
    assert old in text
    with pytest.raises(ServiceError, match=reason):
        document.decode(text.replace(old, new, 1).encode())


def test_a_reader_ignores_what_a_later_version_adds() -> None:
    data = VECTOR["payload"].replace('"version":1}', '"later":[1],"version":1}')
    assert isinstance(document.decode(data.encode()), Receipt)


def test_a_missing_key_file_is_made_for_its_owner_alone_and_used_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    [made] = signing.load_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [path]
    [again] = signing.load_keys(path)
    assert again.kid == made.kid


def test_the_first_key_signs_and_all_are_published(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    new = signing.SigningKey.of(Ed25519PrivateKey.generate())
    path.write_bytes(msgspec.json.encode(signing.JwkSet([new.jwk(private=True), KEY.jwk(private=True)])))
    path.chmod(0o600)
    keys = signing.load_keys(path)
    assert [one.kid for one in keys] == [new.kid, KEY.kid]
    data = signing.published(keys)
    assert b'"d"' not in data
    signing.verified(VECTOR["receipt"], signing.public_keys(data))


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b'{"keys":[]}', 0o600, "0 private keys"),
        (b"{", 0o600, "no JWK set"),
        (b'{"keys":[{"kty":"OKP","crv":"Ed25519","d":"AAAA"}]}', 0o600, "no JWK set with private keys"),
        (b'{"keys":[]}', 0o644, "chmod 600"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused_with_the_reason(
    content: bytes, mode: int, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=reason):
        signing.load_keys(path)


def test_a_key_file_where_none_can_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        signing.load_keys(tmp_path / "none" / "keys.json")
