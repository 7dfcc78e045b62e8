"""Deployments whose prefill and decode instances are separate: rank tables, and the start of one instance.

`rank_table` reads and checks the two kinds of table, `table_tool` makes them (`antiphon ranktable`), `instance` finds
the place of this process in them, and `start` runs it (`antiphon start-role`).
"""
