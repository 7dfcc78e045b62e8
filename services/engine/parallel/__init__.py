"""Tensor and pipeline parallelism: the parts of a model, and communication between ranks.

    shard          the part of a model on each rank: heads and columns (tensor parallel), layers (pipeline parallel)
    meeting        the address at which the ranks meet
    communicator   all-reduce, minima, and transfer of hidden states
    linear         the layers whose results are summed over ranks

Every rank runs the same worker on the same plans, with a smaller decoder. Ranks exchange only hidden states: each rank
computes the logits and samples the tokens itself, with equal results. `executor` starts the ranks.
"""
