"""Quantized weights: their data structure, quantization of plain weights, and reading of quantized checkpoints.

    weight      `QuantizedWeight`, the form that all backends take
    group_order the order of a weight's columns if its groups have inputs from all over the matrix
    rounding    plain weights → quantized ones, each to the nearest value
    online      which matrices `--quantization=ifq` and the like round while a model is loaded
    method      the interface of a method of prepared checkpoints (those that were quantized beforehand)
    formats     the methods: which tensors of a checkpoint stand for a weight
    choice      how a worker reads and quantizes the weights, from the settings and the model
                (`antiphon.shared.settings.quantization` has the rules)

The matrix products are in the backends: `cpu/source/quantized.h`, `models/layers/linear.py`.
"""
