"""Actors and the processes that run them: mailboxes and handlers, heartbeats, start, signals and shutdown.

| module        | contents                                                                  |
|---------------|---------------------------------------------------------------------------|
| `actor`       | `Actor`: a bounded mailbox and a handler for each type of message; `ask`  |
| `background`  | tasks that are referenced until they end, and whose failures are reported |
| `presence`    | heartbeats, and the table of members that are alive                       |
| `discovery`   | the service discovery protocol of NATS                                    |
| `host`        | the interface between a process and its service                           |
| `service`     | the process of a service                                                  |
| `standby`     | a process that waits to become a service                                  |
| `imports`     | imports without garbage collections in between                            |
| `fair_work`   | work that clients wait for: they take turns, and none fills the queue     |
| `image_parts` | reads images and embeddings part by part from the process that has them   |

Actors send over the interface `antiphon.shared.bus.transport`. Only `service` makes a connection to NATS.
"""
