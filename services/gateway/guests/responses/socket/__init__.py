"""The Responses API on a WebSocket: one connection for the many responses of an agent, each continuing the last one.

A message `response.create` becomes a request like `POST /v1/responses` with `stream`, and passes the same code, from
the check of its key on. Its events are messages of the connection.

| module       | what it does                                                                        |
|--------------|-------------------------------------------------------------------------------------|
| `connection` | serves one connection: its messages in order, its age, its end                      |
| `messages`   | reads what clients send, and encodes errors                                         |
| `exchange`   | passes one message through the application, and its answer on to the client         |
| `memory`     | keeps the last responses of each connection, which it continues without the store   |
| `warm_up`    | prepares a response that is not generated                                           |
"""
