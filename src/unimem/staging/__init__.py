"""Models staged once in shared memory, for every process that opens their path."""
