"""The quantization tool: writes a quantized checkpoint of a model, which this server and others can load.

    job          the options of a run
    plan         which matrices are quantized, in which groups; whether the tensor-parallel degree can divide them
    text         calibration and held-out tokens
    layer        one layer's forward pass, and statistics of its matrices' inputs
    algorithms   weight_only_int8, smooth_quant, awq, gptq: a layer's tensors → the tensors to store
    scaling      moves factors between a matrix's inputs and the preceding operation (smooth_quant, awq)
    grid         values, scales and zero points of a matrix
    layouts      the tensors of a matrix in the file formats, and `quantization_config`
    output       the files of the result: shards, index, record; continues where a run was interrupted
    run          the loop over layers, and the report

One layer is in memory at a time, in its original and its quantized form. Called by `antiphon quantize`. The loading
side is `services/engine/quantization`.
"""
