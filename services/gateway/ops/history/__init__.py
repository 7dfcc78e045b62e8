"""What the server did in the last hour, kept by each gateway: one point for each step of two seconds.

`points` keeps numbers, `differences` makes rates and quantiles of counters, `readings` says which numbers there are;
all three are pure. `guest` samples, `endpoint` answers.
"""
