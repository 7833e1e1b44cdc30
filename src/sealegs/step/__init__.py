"""The inside of a step, in its order: ``step_inputs.py``, ``decision.py``, ``gate.py`` on the device, ``update.py``."""
