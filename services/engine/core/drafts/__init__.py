"""Draft tokens: where those of a sequence come from. Which are used, accepted and worth their time: `policy`."""
