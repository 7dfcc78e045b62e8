"""Shadow traffic: copies of requests that run on another version of the model."""
