"""Model families: one short file each, over one shared description of a decoder."""
