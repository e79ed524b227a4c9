"""Remote: files on object stores and web servers, their transfers and hashes."""
