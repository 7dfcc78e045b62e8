"""Finished responses.

| module            | what it does                                                         |
|-------------------|----------------------------------------------------------------------|
| `store`           | keeps finished responses                                             |
| `records`         | keeps records of any kind on the bus, or in memory                   |
| `stored_pictures` | takes the files of pictures out of records                           |
"""
