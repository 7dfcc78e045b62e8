"""What memory a worker has and needs: measured, predicted and divided; the KV cache and the swap space."""
