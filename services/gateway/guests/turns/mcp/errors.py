"""How a request to a tool's server can fail."""

from typing import Any


class ToolFailedError(Exception):
    """The request has certainly failed: nothing was sent, or the server has answered with an error.

    `told`: the error of an item, in the form of OpenAI's API.
    """

    def __init__(self, message: str, told: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.told = told or {"type": "http_error", "code": 0, "message": message}


class ResultUnknownError(Exception):
    """The request was sent, and no answer to it has arrived: the tool may have run."""
