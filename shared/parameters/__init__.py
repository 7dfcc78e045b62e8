"""The parameters of a sequence or of pooling, as they travel from the edge to the engines."""
