"""Sessions, `/v1/sessions`: recorded generations that are exported to a file, imported elsewhere, and continued.

| module      | what it does                                                                       |
|-------------|------------------------------------------------------------------------------------|
| `api`       | the endpoints                                                                      |
| `schemas`   | their bodies                                                                       |
| `session`   | a session, its description for clients, and the names of its blocks                |
| `store`     | keeps sessions on the bus, and a list of them for each API key                     |
| `exporting` | writes a session's file, with blocks that an engine reads from its disk            |
| `importing` | reads a file, and passes its blocks on to engines                                  |
| `blocks`    | asks engines for blocks, and gives them blocks; the guest                          |
| `continued` | makes the request that continues a session                                         |
"""

NEEDS = ("replay", "responses")
"""See `apis.finding`: a session is a recorded request, and is kept where responses are."""
