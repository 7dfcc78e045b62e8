"""The message bus: its interfaces, which actors and services use, and their implementation with NATS and JetStream.

| module             | contents                                                                    |
|--------------------|-----------------------------------------------------------------------------|
| `transport`        | the interface: subjects, publish, request and reply, subscriptions          |
| `durable_log`      | the interface to a log of messages that outlives its writer                 |
| `key_value`        | the interface to a small shared store                                       |
| `credentials`      | the URLs of the servers, and the file with user and password                |
| `nats`             | `NatsTransport`: the bus over a NATS server; makes all that follows         |
| `nats_client`      | the client of nats-py, with a shorter way for messages                      |
| `nats_tcp`         | its TCP connection                                                          |
| `nats_durable_log` | the log on JetStream                                                        |
| `nats_key_value`   | the store on JetStream                                                      |

Messages and their encoding are in `shared/messages` and `shared/codec.py`, subjects in `shared/subjects.py`. No actors
here.
"""
