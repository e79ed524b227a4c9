# The one place where a native status becomes a Python exception.
from unimem._core.native cimport um_error, um_status

# Raises the exception for a failed call. `subject` says what was being done, as in
# "Tape 'scratch'"; `full` is the CapacityError to raise for UM_E_FULL, `unit` what its figures
# count, and `format` the FormatError for UM_E_FORMAT.
cdef object raise_status(um_status status, const um_error *err, str subject,
                         type full=*, str unit=*, type format=*)
# What the message of a CapacityError says: who has too little left.
cdef str full_text(str subject, object asked, str unit, object limit, object used)
# `raise_status` where the status may be UM_E_IO: of the file at this path, or None.
cdef object raise_file_status(um_status status, const um_error *err, str subject, str path)
