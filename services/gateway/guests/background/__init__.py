"""Background responses that survive their gateway: any gateway can show, stream, cancel and continue them.

| module         | what it does                                                              |
|----------------|---------------------------------------------------------------------------|
| `api`          | joins the responses and the recorded requests                             |
| `recorded`     | runs, shows, cancels and stores responses, and takes them over            |
| `snapshot`     | rebuilds a response from its events                                       |
| `guest`        | makes the recorded requests of a gateway                                  |
| `requests`     | `BackgroundStreams`: runs recorded requests, and takes them over          |
| `event_writer` | writes and reads the events of one request                                |
| `store`        | the two logs on the bus that hold the requests and their events           |
"""

NEEDS = ("responses", "resume")
"""See `apis.finding`: without streams that are resumed, a background response ends with its gateway."""
