"""The image service: pictures to the embeddings that stand for them in a prompt. Any number of replicas."""
