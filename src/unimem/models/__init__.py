"""Models: their dimensions, families, fields and the shapes of their buffers."""
