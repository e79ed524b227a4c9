"""Planning: what a model needs, before any of it is taken."""
