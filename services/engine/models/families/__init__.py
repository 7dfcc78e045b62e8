"""Families of models: a short module each, which describes the family's decoders by a `DecoderDescription`."""
