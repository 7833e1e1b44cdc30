"""A detector looks at the row of a step and says what is wrong with it. One module each.

A new one is a frozen class as ``contract.py`` says; ``sealegs.judge.standard`` has the list of those that are used. The
signals of a row are measured in ``sealegs.signals.meter``, and named in ``sealegs.record.schema``.
"""
