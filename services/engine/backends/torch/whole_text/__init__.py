"""Models that compute all tokens of a text in one step: encoders, and classifiers of texts."""
