"""Tools that the server runs: the items that tell of them, and the seam to the guest that runs them.

| module    | what it does                                                         |
|-----------|----------------------------------------------------------------------|
| `items`   | the items of calls, and the conversation that they form              |
| `seam`    | what the Responses API asks of the guest that runs the tools         |
| `waiting` | the wait of a client for a response that runs detached from it       |
"""
