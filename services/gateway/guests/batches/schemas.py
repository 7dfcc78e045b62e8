"""The body of `POST /v1/batches` as a struct, and its checks."""

import msgspec

from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules, Requirement
from antiphon.services.gateway.guests.batches.requests import ENDPOINTS
from antiphon.shared.request.checks import missing, refuse

WINDOW = "24h"


class BatchBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None


BATCH_DECODER = msgspec.json.Decoder(BatchBody)
RULES = FieldRules(
    hints=frozenset(),
    requirements={"output_expires_after": Requirement((None,), "Output files are kept as long as other files.")},
)


def check(body: BatchBody) -> tuple[str, str]:
    """Returns the input file's id and the endpoint. Raises ServiceError for a missing or an invalid field."""
    if body.input_file_id is None:
        missing("input_file_id")
    if body.endpoint is None:
        missing("endpoint")
    if body.completion_window is None:
        missing("completion_window")
    if body.endpoint not in ENDPOINTS:
        refuse("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if body.completion_window != WINDOW:
        refuse("completion_window", f"must be '{WINDOW}'")
    return body.input_file_id, body.endpoint
