"""The quantization tool: writes a smaller checkpoint of a model that this server and others load.

    job          what was asked for, and which layouts the algorithms write
    plan         which matrices are quantized, in which groups; what must divide by the tensor-parallel degree
    text         calibration and held-out tokens
    layer        one layer's forward pass, and statistics of what its matrices read
    algorithms   weight_only_int8, smooth_quant, awq, gptq: a layer's tensors → the tensors to store
    scaling      moves factors between a matrix's inputs and whatever comes before it (smooth_quant, awq)
    grid         values, scales and zero points of a matrix
    layouts      the tensors that stand for a matrix in a file, and `quantization_config`
    output       the files of the result: shards, index, record; continues where a run was interrupted
    run          the loop over layers, and the report

One layer is in memory at a time, once as it was and once as it becomes. Called by `antiphon quantize`. The loading side
is `services/engine/quantization`.
"""
