"""Responses whose tools the server runs: several model steps, and calls of tools of which each is made once.

| module     | what it does                                                                        |
|------------|-------------------------------------------------------------------------------------|
| `api`      | gives the Responses API the tools of this gateway                                   |
| `plan`     | reads the tools of a request, and says which server is meant                        |
| `toolbox`  | the tools of one response: lists them, calls them, knows which may be called again  |
| `encoder`  | the items and events of a response with several model steps                         |
| `journal`  | reads from the events how far a response has come                                   |
| `known`    | leaves out events that an earlier run has written                                   |
| `turn`     | runs a response: lists tools, runs model steps, makes calls                         |
| `mcp`      | a client of MCP servers                                                             |

The events of a response are its journal: they are on the bus before a call is sent, and before the model sees a result.
"""

NEEDS = ("responses",)
"""See `apis.finding`."""
