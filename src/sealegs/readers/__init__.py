"""From a training log of any format to a ``Run``. One module a format.

A new one has ``recognises`` and ``read``, as ``contract.py`` says, and a place in ``read.READERS``. Lines that
a program prints need no module: ``wording.py`` and ``text.py`` know them.
"""
