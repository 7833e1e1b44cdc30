"""From tensors on the device to the numbers of a row, without waiting for them. Start at ``meter.py``.

A new signal is a sample in ``Meter._samples``; how it is computed is beside its like, in ``weights.py``, ``norms.py``
or ``activations.py``.
"""
