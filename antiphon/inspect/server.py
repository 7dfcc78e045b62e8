"""Gets JSON from a gateway, for the commands that inspect or operate a server."""

import json
from typing import Any

from antiphon.chat import Client, ServerError
from shared.config import SettingsError


def ask(client: Client, path: str) -> Any:
    """Returns the decoded answer to a GET request. Raises SettingsError with the server's message for a failure."""
    try:
        return json.loads(client.get(path))
    except ServerError as error:
        raise SettingsError(str(error)) from error


def tell(client: Client, path: str, body: dict[str, Any]) -> Any:
    """Returns the decoded answer to a POST request. Raises SettingsError with the server's message for a failure."""
    try:
        return json.loads(client.post(path, body))
    except ServerError as error:
        raise SettingsError(str(error)) from error
