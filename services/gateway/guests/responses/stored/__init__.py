"""Finished responses.

| module          | what it does                                       |
|-----------------|----------------------------------------------------|
| `store`         | keeps finished responses                           |
| `records`       | keeps records of any kind on the bus, or in memory |
| `stored_images` | takes the files of images out of records           |
"""
