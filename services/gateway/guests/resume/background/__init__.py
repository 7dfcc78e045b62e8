"""Recorded requests without a client, which survive their gateway: any gateway continues them.

| module         | what it does                                                              |
|----------------|---------------------------------------------------------------------------|
| `requests`     | `BackgroundStreams`: runs the requests, and takes them over               |
| `event_writer` | writes and reads the events of one request                                |
| `store`        | the two logs on the bus that hold the requests and their events           |
"""
