"""The parts of the HTTP edge that do not depend on the API: keys, limits, errors, request ids, events. No bus.

| module          | what it does                                                   |
|-----------------|----------------------------------------------------------------|
| `server/`       | uvicorn, its listening socket and its bounded connections      |
| `edge`          | middleware around every request: key, id, metrics, path prefix |
| `auth`          | checks API keys                                                |
| `admission`     | admits a request within the limits of its key                  |
| `request_id`    | draws request ids                                              |
| `request_body`  | reads a body within its limits, and counts what is in memory   |
| `errors`        | converts failures to error objects                             |
| `json_response` | makes responses of JSON                                        |
| `in_process`    | sends the gateway's own requests to the application            |
| `sse`           | writes server-sent events to a client that may be slow         |
| `idempotency`   | answers a repeated request with the first answer               |
| `disconnect`    | cancels a request whose client has disconnected                |
"""
