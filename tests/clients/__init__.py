"""Other people's clients against the running system: `make client-test`. Not part of `make test`."""
