"""Several processes that compute one model: who has which part of it, and how they exchange data.

    shard          what part of a model a rank has: heads and columns (tensor parallel), layers (pipeline parallel)
    meeting        where the ranks find each other
    communicator   sums, minima and hidden states between ranks
    linear         the layers whose results are summed over ranks

Every rank runs the same worker on the same plans, with a smaller decoder. Ranks exchange hidden states only: each
computes the logits and samples by itself, with equal results. `executor` starts the ranks.
"""
