"""Commands that show a running system in the terminal: `antiphon tap`, `top`, `trace` and `watch`."""
