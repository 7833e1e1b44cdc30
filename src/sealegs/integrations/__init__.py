"""The guard in the loops of frameworks. Each is a module with ``attach``.

A new framework is a module here that opens a ``LoopPort`` with ``loop_options.open_loop`` and calls it in the order of
its loop. Copy ``hf.py`` where the framework has the loop, ``accelerate.py`` where the user has it.
"""
