"""What one guest offers to others (`Guests.offer`), so that they need not know its folder."""

from typing import NamedTuple, Protocol


class UploadedFile(Protocol):
    """The description of an uploaded file."""

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        ...

    @property
    def purpose(self) -> str:
        """What it was uploaded for."""
        ...


class UploadedFiles:
    """The uploaded files of the key of the current call."""

    async def get(self, file_id: str) -> UploadedFile:
        """Returns the description of a file. Raises ServiceError('not_found')."""
        raise NotImplementedError

    async def read(self, file_id: str) -> bytes:
        """Returns the data of an existing file, which the caller knows to be small. Raises FileNotFoundError."""
        raise NotImplementedError


class RecordedOutput(NamedTuple):
    """What the bus has of a request that can be continued. `ended`: its output is complete."""

    until: float
    """Unix time up to which the request can be continued; after it nobody will."""
    ended: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class RecordedRequests:
    """The requests that another gateway can continue."""

    async def recorded(self, request_id: str) -> RecordedOutput | None:
        """Returns what the bus has of a request; None if it cannot be continued. Raises LogUnavailableError."""
        raise NotImplementedError
