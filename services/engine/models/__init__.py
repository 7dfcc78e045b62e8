"""Model families: one short module each, which describes its decoders by the shared `DecoderDescription`."""
