"""Who may use the gateway and how much: API keys, limits, deadlines, usage records. Knows no HTTP server, no engines.

| module              | what it does                                                                              |
|---------------------|-------------------------------------------------------------------------------------------|
| `key_file`          | reads the file of API keys (`shared.security.api_keys`) when it changes                   |
| `call`              | the HTTP request in progress: its key and the headers that concern access                 |
| `guard`             | the backend as one key sees it, and generations within its limits; all endpoints use it   |
| `quotas`, `account` | limits that hold for all gateways together                                                |
| `usage`             | passes usage records on without delaying requests                                         |
| `usage_sinks`       | where they go: the bus, a file, a web server                                              |
| `usage_metrics`     | counts of usage records for `/metrics`                                                    |
"""
