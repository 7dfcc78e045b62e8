"""An engine that sleeps: it frees its memory and stays on the bus (docs/guides/sleep.md, ADR 106)."""
