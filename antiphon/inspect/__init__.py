"""Commands that show a running system in the terminal: `antiphon tap`, `antiphon top` and `antiphon trace`."""
