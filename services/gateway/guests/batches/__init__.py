"""Batches, `/v1/batches`: files of requests, which run with lower priority than all other requests.

| module      | what it does                                                                     |
|-------------|----------------------------------------------------------------------------------|
| `api`       | creates, lists, retrieves and cancels batches                                    |
| `batches`   | starts batches, and continues those whose gateway has ended                      |
| `runner`    | runs one batch                                                                   |
| `places`    | limits the requests of all batches that run at the same time                     |
| `requests`  | checks and reads the requests of an input file                                   |
| `answers`   | reads back the answers of an earlier run                                         |
| `record`    | the state of a batch, on disk and in the API                                     |
| `store`     | stores records in the directory of files; a lock determines who runs a batch     |
| `schemas`   | the body that creates a batch                                                    |
"""

NEEDS = ("files",)
"""See `apis.finding`: what a batch reads and writes are files."""
