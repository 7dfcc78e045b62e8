"""Resumable streams: any gateway continues a stream whose gateway has died or whose client reconnects.

    streams.resumable(path, endpoint)   the endpoint, with its streams recorded and resumed by `Last-Event-ID`
    streams.retrieve                    `GET /v1/streams/{id}`
    streams.journal.run()               writes tokens and records in a task, so that the token path does not wait

| module         | what it does                                                           |
|----------------|------------------------------------------------------------------------|
| `streams`      | records streams that begin, and takes over those that a client resumes |
| `claim`        | the state that a run takes over from the former run of its stream      |
| `running`      | one stream that runs here: with its client, without, or taken away     |
| `positioned`   | gives each event an id, and omits events that the client already has   |
| `cut`          | splits regenerated output at the client's position                     |
| `position`     | the form of a position in an id                                        |
| `journal`      | writes the accepted tokens of all streams, four times a second         |
| `record`       | what is stored of a stream                                             |
| `store`        | the two logs on the bus that hold records and journals                 |
| `body_images`  | takes images out of the body of a recorded request                     |
| `guest`, `api` | make the streams of a gateway; their route                             |
"""
