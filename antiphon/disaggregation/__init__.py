"""Deployments whose prefill and decode instances are separate: rank tables, and the start of one instance.

`rank_table` reads and checks the two kinds of tables, `table_tool` creates them (`antiphon ranktable`), `instance`
finds this process's entry in them, and `start` runs the instance (`antiphon start-role`).
"""
