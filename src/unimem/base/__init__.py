"""Base: text, HTML, arguments, files and threads. Knows nothing of memory."""
