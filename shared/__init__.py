"""What every service shares: messages, subjects, errors, limits, actors. Imports no service and never torch."""
