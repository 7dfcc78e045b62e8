"""Limits the requests of all batches of a gateway that run at the same time, and the memory of their bodies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from antiphon.shared.files import limits as file_limits


class Places:
    """Places for requests. Who asks first is first; so a large request gets its places although small ones follow."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(file_limits.BATCH_CONCURRENCY)
        self._first = asyncio.Lock()
        """Held by the request that takes its places, so that two large ones do not wait for each other's."""

    @contextlib.asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Context manager for the run of a request whose line has so many bytes: waits for its places."""
        num_taken = 0
        try:
            async with self._first:
                while num_taken * file_limits.BATCH_PLACE_BYTES < num_bytes:
                    await self._free.acquire()
                    num_taken += 1
            yield
        finally:
            for _ in range(num_taken):
                self._free.release()
