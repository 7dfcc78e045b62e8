"""The image service: converts images to embeddings for the engine. Any number of replicas."""
