"""Who may use the gateway and how much: API keys, limits, fair shares, deadlines, usage records. No HTTP, no engines.

| module            | what it does                                                                   |
|-------------------|--------------------------------------------------------------------------------|
| `keys`            | what an API key allows, and the file that lists keys                           |
| `key_file`        | reads that file again when it changes                                          |
| `call`            | the HTTP request in progress: its key, its deadline, its limits                |
"""
