"""Model families. Each module describes its family's decoders by a `DecoderDescription`."""
