"""What any call of a compiled method costs: one of two integers that does nothing."""


cdef class EmptyCall:
    """Has the cheapest method there is, which `unimem_bench` compares with."""

    def call(self, size_t nbytes, size_t align):
        """Do nothing.

        Parameters
        ----------
        nbytes, align : int
            Converted to C, as those of ``Tape.take_address`` are.
        """
        return None
