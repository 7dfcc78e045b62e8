"""Uploaded files and batches, as the gateway and `antiphon run-batch` know them. Pure.

| module        | what it does                                                           |
|---------------|------------------------------------------------------------------------|
| `limits`      | the limits of files and batches                                        |
| `batch_lines` | reads and writes the lines of batch files                              |
"""
