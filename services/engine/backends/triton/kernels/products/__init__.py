"""Products with weights, plain and quantized."""
