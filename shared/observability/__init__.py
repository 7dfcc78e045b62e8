"""What services tell about themselves: traces (`telemetry`), `histograms`, step records (`step_rows`) and `logs`."""
