"""The actor runtime: mailboxes and handlers (`actor`), the bus seam (`transport`) and its two implementations."""
