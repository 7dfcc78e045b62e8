"""The decoder, its description (`DecoderDescription`), and the model families, each of which is a short module."""
