"""Let PYTHONPATH come before an editable install.

Python runs this at its start, after which modules on PYTHONPATH are found first.
"""

import sys

sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
