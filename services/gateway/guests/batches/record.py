"""The state of a batch, in its form on disk and in OpenAI's API. Pure."""

from typing import Any, Literal

import msgspec

from antiphon.shared.files.batch_lines import BatchLineError
from antiphon.shared.security.api_keys import ANONYMOUS

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
"""Final states of a batch."""
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in an input file. `line`: number of the line, from 1; None if the error concerns the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """One batch. Times are in Unix seconds. The ids of output files are drawn when the batch is created."""

    id: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    created_at: int
    expires_at: int
    key: str = ANONYMOUS.name
    """Name of the API key that made the batch, with which its requests run. Not shown."""
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    status: Status = "validating"
    times: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Time at which the batch entered each state, by state."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    """Whether the output file and the error file exist; a file that would be empty is not created."""
    errors: list[LineError] = msgspec.field(default_factory=list[LineError])
    starts: int = 1
    """How often the batch was started without an answer since: at its creation, and after each death of its gateway. A
    gateway that drains releases the batch, and the next start does not count."""

    @property
    def is_final(self) -> bool:
        """Whether the batch has ended."""
        return self.status in FINAL

    def enter(self, status: Status, now: int) -> None:
        """Changes the state."""
        self.status = status
        self.times[status] = now

    def to_object(self) -> dict[str, Any]:
        """Returns the batch as OpenAI's API shows it."""
        errors = [msgspec.to_builtins(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if self.has_output else None,
            "error_file_id": self.error_file_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def invalid_line(error: BatchLineError, line: int) -> LineError:
    """Returns the error of an invalid line."""
    return LineError(code="invalid_request", message=f"Line {line}: {error}.", line=line)
