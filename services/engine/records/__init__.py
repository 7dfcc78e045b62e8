"""What an engine records of its sequences for people: spans, durations, and the steps of recorded requests."""
