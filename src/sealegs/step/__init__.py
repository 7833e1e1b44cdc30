"""The inside of a step, in its order: ``measurement.py``, ``decision.py``, ``gate.py`` on the device, ``update.py``."""
