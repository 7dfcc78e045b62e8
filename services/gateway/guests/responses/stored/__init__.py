"""Finished responses.

| module            | what it does                                                         |
|-------------------|----------------------------------------------------------------------|
| `store`           | keeps finished responses in this gateway                             |
| `log_store`       | keeps finished responses on the bus, for all gateways                |
| `log_records`     | keeps records of any kind on the bus                                 |
| `stored_pictures` | takes the files of pictures out of stored responses                  |
"""
