"""The other half of the transfers of KV for tests of the core: loads write what they should, saves are checked."""

from dataclasses import dataclass, field

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.kv.kv_transfer import KvLoad, KvLoaded, KvReleased, KvSave, KvStore
from antiphon.shared.blocks import chain_hashes, split_hashes
from antiphon.shared.codec import pack_ids
from tests.property.engine_worker import ModelWorker, Row


@dataclass
class Transfers:
    """The loads and saves of one core that have not ended."""

    worker: ModelWorker
    loads: list[tuple[KvLoad, dict[bytes, list[object]]]] = field(default_factory=list)
    """With the content of each block that the load brings, by its name."""
    saves: list[tuple[KvSave | KvStore, list[object]]] = field(default_factory=list)
    stored: dict[bytes, list[object]] = field(default_factory=dict)
    """What the tier below the KV cache has, by name."""
    num_loaded: int = 0
    num_from_tier: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.loads or self.saves)

    def take(self, core: Core, salts: dict[str, bytes]) -> None:
        meta = core.transfers.plan_meta()
        for load in meta.loads:
            content = content_of_load(core, load, salts)
            if not load.address:
                found = {name: self.stored[name] for name in load.hashes}
                right = [content[name] == found[name] for name in load.hashes if content and name in content]
                assert all(right), "other content is stored under a name"
                content = found
            self.loads.append((load, content))
        for save in (*meta.saves, *meta.stores):
            self.saves.append((save, self.content_of(save)))
        assert set(meta.cancelled) <= {load.transfer_id for load, _ in self.loads}

    def store(self, core: Core, tokens: tuple[int, ...], salt: bytes) -> None:
        """Puts the blocks of tokens into the tier, as another engine would have done."""
        size, row = core.facts.block_size, Row("", salt)
        row.append(tokens)
        for index, name in enumerate(split_hashes(chain_hashes(pack_ids(tokens), size, salt))):
            prefixes = row.prefixes[index * size : (index + 1) * size]
            self.stored[name] = list(prefixes)
            for group, own in enumerate(core.windows.names(name)):
                self.stored[own] = [(group, prefix) for prefix in prefixes]
            for piece in core.transfers.pieces.names(name):
                self.stored[piece] = [prefixes[-1]] * size

    def end(self, pick: int, share: float) -> KvLoaded | KvReleased:
        number = pick % (len(self.loads) + len(self.saves))
        if number >= len(self.loads):
            save, content = self.saves.pop(number - len(self.loads))
            assert self.content_of(save) == content, "a block changed while another engine reads it"
            if isinstance(save, KvStore) and share > 0:
                size = self.worker.facts.block_size
                for place, name in enumerate(save.hashes):
                    self.stored[name] = content[place * size : (place + 1) * size]
            return KvReleased(save.block_ids)
        load, content = self.loads.pop(number)
        count = int(share * len(load.host_blocks))
        for block, name in zip(load.host_blocks[:count], load.hashes, strict=False):
            if block < self.worker.facts.num_host_blocks:
                self.worker.host[block] = dict(enumerate(content.get(name, ())))
            elif not load.address:
                [state] = set(content[name])
                assert isinstance(state, int)
                self.worker.states[self.slot_of(block, self.worker.facts.num_host_blocks)] = state
            elif content:
                last = content[load.hashes[-(-load.num_tokens // self.worker.facts.block_size) - 1]][-1]
                assert isinstance(last, int)
                self.worker.states[self.slot_of(block, self.worker.facts.num_host_blocks)] = last
        self.num_loaded += count
        self.num_from_tier += 0 if load.address else count
        return KvLoaded(load.transfer_id, count)

    def content_of(self, save: KvSave | KvStore) -> list[object]:
        """The prefixes in the blocks of a save."""
        size = self.worker.facts.block_size
        last = save.num_tokens_in_last if isinstance(save, KvSave) else size
        counts = [size] * (len(save.block_ids) - 1) + [last]
        num_blocks = self.worker.facts.num_blocks
        return [
            self.worker.kv[block, offset] if block < num_blocks else self.worker.states[self.slot_of(block, num_blocks)]
            for block, count in zip(save.block_ids, counts, strict=True)
            for offset in range(count)
        ]

    def slot_of(self, number: int, first: int) -> int:
        """The slot of a state of which this is a piece."""
        return (number - first) // self.worker.facts.state_pieces


def content_of_load(core: Core, load: KvLoad, salts: dict[str, bytes]) -> dict[bytes, list[object]]:
    """The content of the blocks that a load has to bring, by name; nothing if nobody waits for it any more."""
    size = core.facts.block_size
    for sequence in core.transfers.waiting():
        names = core.prefix_cache.names(sequence)
        if load.hashes[0] not in names or sequence.sequence_id not in salts:
            continue
        first, count = names.index(load.hashes[0]), -(-load.num_tokens // size)
        if tuple(names[first : first + count]) == load.hashes[:count]:
            row = Row(sequence.sequence_id, salts[sequence.sequence_id])
            row.append(tuple(sequence.tokens))
            end = first * size + load.num_tokens
            found = dict[bytes, list[object]]()
            for index, name in enumerate(names):
                prefixes = row.prefixes[index * size : min(end, (index + 1) * size)]
                found[name] = list(prefixes)
                for group, own in enumerate(core.windows.names(name)):
                    found[own] = [(group, prefix) for prefix in prefixes]
            return found
    return {}
