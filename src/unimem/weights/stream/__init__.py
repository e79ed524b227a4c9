"""Models larger than memory: pieces of their files are read into a budget of slots."""
