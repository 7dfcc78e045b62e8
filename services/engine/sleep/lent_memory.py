"""The blocks of a worker that is about to free them, as the connector has them.

The connector, the disk tier and the step loop refer to each other, and a process excludes what it makes at its start
from garbage collections (`shared.actors.service`). Whatever is still among them must therefore not hold the KV cache.
"""

from antiphon.services.engine.kv.layout import KvLayout, KvMemory, OwnForm
from antiphon.services.engine.kv.pieces import Bytes


class LentMemory:
    """A `KvMemory` that can be taken back. No thread may use it then."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory: KvMemory | None = memory
        self._layout = memory.layout

    @property
    def layout(self) -> KvLayout:
        """See KvMemory."""
        return self._layout

    @property
    def own(self) -> OwnForm | None:
        """See KvMemory."""
        return self._lent.own

    def read(self, block: int, out: Bytes) -> int:
        """See KvMemory."""
        return self._lent.read(block, out)

    def write(self, host_block: int, data: Bytes) -> int:
        """See KvMemory."""
        return self._lent.write(host_block, data)

    def take_back(self) -> None:
        """Drops the memory."""
        self._memory = None

    @property
    def _lent(self) -> KvMemory:
        assert self._memory is not None, "the engine has left its memory"
        return self._memory
