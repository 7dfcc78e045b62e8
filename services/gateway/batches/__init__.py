"""Batches, `/v1/batches`: files of requests, which run with lower priority than all other requests.

| module      | what it does                                                                     |
|-------------|----------------------------------------------------------------------------------|
| `endpoints` | creates, lists, retrieves and cancels batches                                    |
| `batches`   | starts batches, and continues those whose gateway has ended                      |
| `runner`    | runs one batch                                                                   |
| `requests`  | checks and reads the requests of an input file                                   |
| `record`    | the state of a batch, on disk and in the API                                     |
| `store`     | stores records in the directory of files; a lock determines who runs a batch     |
| `schemas`   | the body that creates a batch                                                    |
"""

from services.gateway.batches.schemas import BatchBody
from services.gateway.openai.openapi import Body

BODIES = {"/v1/batches": Body(BatchBody, ("input_file_id", "endpoint", "completion_window"))}
