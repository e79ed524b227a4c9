"""For PYTHONPATH: an editable install finds its modules before those of PYTHONPATH.

Python runs this at its start; what is on PYTHONPATH is found first then.
"""

import sys

sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
