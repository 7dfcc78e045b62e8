"""Sessions in the gateway: the model that a file belongs to, names of blocks, and the list of a key's sessions."""

import asyncio
from typing import Any

import msgspec
import pytest

from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.guests.responses.stored.records import MemoryRecords
from antiphon.services.gateway.guests.sessions.exporting import root
from antiphon.services.gateway.guests.sessions.importing import card_for
from antiphon.services.gateway.guests.sessions.session import Moved, Session, as_raw, block_names, root_of
from antiphon.services.gateway.guests.sessions.store import SessionStore
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared import limits
from antiphon.shared.blocks import adapter_salt, chain_hashes, root_hash, split_hashes
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ModelFacts
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.recorded_request import RecordedContent, RecordedPrompt, RecordedSequence
from antiphon.shared.security.api_keys import ApiKey
from antiphon.shared.session_file.frames import SessionHead


def content(**fields: Any) -> RecordedContent:
    known: dict[str, Any] = {
        "request_id": "r",
        "created": 1.0,
        "model": "tiny",
        "path": "/tiny",
        "max_model_len": 100,
        "configuration": [],
        "params": SamplingParams(max_tokens=5),
        "n": 1,
        "num_sequences": 1,
        "prompts": [RecordedPrompt(list(range(40)))],
        "sequences": [RecordedSequence(list(range(40, 70)))],
    }
    return RecordedContent(**{**known, **fields})


def card(name: str, digest: str, **fields: Any) -> ModelCard:
    facts = ModelFacts(digest=digest)
    return ModelCard(name=name, path=f"/{name}", max_model_len=100, vocab_size=100, created=0, facts=facts, **fields)


def head(weights: str) -> SessionHead:
    return SessionHead(created=1.0, content=msgspec.Raw(b"{}"), weights=weights)


def test_a_file_belongs_to_the_model_with_the_same_files_whatever_its_name() -> None:
    models = [card("other", "w2"), card("renamed", "w1"), card("tiny", "w3")]
    assert card_for(head("w1"), content(), models).name == "renamed"
    assert card_for(head("w1"), content(), [*models, card("tiny", "w1")]).name == "tiny"
    with pytest.raises(
        ServiceError, match=r"of another model: 'tiny'.* w9\. The models here are: other, renamed, tiny"
    ):
        card_for(head("w9"), content(), models)
    with pytest.raises(ServiceError, match="needs the adapter with the version v"):
        card_for(head("w1"), content(adapter_version="v"), models)
    assert (
        card_for(head("w1"), content(adapter_version="v"), [*models, card("a", "w1", adapter_version="v")]).name == "a"
    )


def test_a_block_is_named_by_prompt_and_output_and_by_the_salt() -> None:
    one = content(block_root=root_hash(b"mine").hex())
    names = block_names(one, root_of(one), 16)
    assert names == split_hashes(chain_hashes(pack_ids(range(70)), 16, b"mine"))
    here = session(content=as_raw(one), salt="drawn", imported=None)
    assert root(here, one) == root_hash(b"mine")


def test_an_imported_session_has_names_of_its_own() -> None:
    one = content(block_root=root_hash(b"mine").hex(), adapter_version="v")
    imported = session(content=as_raw(one), salt="drawn", imported=Moved(in_file=1, taken=1))
    assert root(imported, one) == root_hash(adapter_salt(b"drawn", "v"))


def test_outputs_of_the_same_prompt_share_its_names_and_the_order_depends_on_tokens_only() -> None:
    sequences = [RecordedSequence([1] * 30), RecordedSequence([2] * 30)]
    one = content(n=2, num_sequences=2, sequences=sequences)
    first, second = block_names(one, root_hash(b"a"), 16), block_names(one, root_hash(b"b"), 16)
    assert len(first) == len(second) == 2 + 2 + 2
    assert not set(first) & set(second)


def test_a_record_of_an_earlier_build_has_no_names() -> None:
    assert root_of(content()) == b""
    assert root_of(content(block_root="zz")) == b""


def test_a_session_of_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSION_BLOCKS_MAX", 3)
    with pytest.raises(ServiceError, match="more than 3 blocks"):
        block_names(content(), root_hash(), 16)


def session(name: str = "sess_a", key: str = "alice", **fields: Any) -> Session:
    known: dict[str, Any] = {"content": as_raw(content()), **fields}
    return Session(id=name, created=1.0, key_name=key, weights="w", **known)


def as_key(name: str) -> Any:
    return serving(Call(key=ApiKey(name=name)))


async def test_a_key_lists_its_sessions_and_reaches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS_MAX", 3)
    store = SessionStore(MemoryRecords())
    await asyncio.gather(*(store.put(session(f"sess_{name}")) for name in "abcd"))
    await store.put(session("sess_z", "bob"))
    with as_key("alice"):
        assert [one.id for one in await store.all()] == ["sess_b", "sess_c", "sess_d"]
        assert (await store.get("sess_a")).id == "sess_a"
        await store.delete(await store.get("sess_c"))
        assert [one.id for one in await store.all()] == ["sess_b", "sess_d"]
        for name in ("sess_c", "sess_z", "sess_", "conv_a", "sess_list-" + "0" * 32):
            with pytest.raises(ServiceError, match="No session"):
                await store.get(name)
    with as_key("bob"):
        assert [one.id for one in await store.all()] == ["sess_z"]
