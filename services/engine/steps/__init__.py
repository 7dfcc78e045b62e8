"""The step loop and what surrounds it: plans in flight, times, events, reports and the watchdog."""
