"""For the people who run the server: timelines, metrics, the console and its controls."""
