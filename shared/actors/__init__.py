"""The actor runtime: mailboxes and handlers (`actor`), the bus interface (`transport`) and its NATS implementation."""
