"""The HTTP edge of the gateway, whatever the API: keys, limits, errors, request ids, server-sent events. No bus.

| module         | what it does                                                   |
|----------------|----------------------------------------------------------------|
| `edge`         | middleware around every request: key, id, metrics, path prefix |
| `request_body` | reads a body within its limits                                 |
| `errors`       | failures to OpenAI's error objects                             |
| `sse`          | a stream of server-sent events to a client that may be slow    |
| `disconnect`   | notices a client that has left                                 |
"""
