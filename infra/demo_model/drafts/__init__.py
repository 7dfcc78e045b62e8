"""Trains a layer that predicts further tokens (MTP) for the demo model, to measure what such drafts are worth."""
