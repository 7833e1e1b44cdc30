"""What every Python that a test starts does first: it looks for hardly any garbage, and for none as it ends.

What an import makes stays until the end, and to go through it again and again is a third of the time of a process that
imports torch or a framework. ``tests/conftest.py`` puts this folder into PYTHONPATH.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)  # the first that is registered is the last that is done
