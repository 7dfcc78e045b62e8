"""What `/metrics` shows: of the gateway, of the engines and of all members."""
