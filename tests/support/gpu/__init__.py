"""A GPU, or a substitute for it."""
