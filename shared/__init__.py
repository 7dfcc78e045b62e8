"""Code that all services share: messages, subjects, errors, limits, actors. Imports no service and no torch."""
