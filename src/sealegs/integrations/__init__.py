"""The guard in the loops of frameworks. Each is a module with ``attach``.

Where the framework has the loop, copy ``hf.py``, which patches its methods, and ``hf_loop.py``, which calls the guard's
``LoopPort`` in the order of that loop; ``lightning_loop.py`` is for one that calls the optimizer itself. Where the user
has the loop, copy ``accelerate.py``, a ``Guard`` of its own, or ``torchft.py``, whose engine decides as well.
``loop_options.py`` opens the loop with the options that all of them share; ``patches.py`` undoes patches.
"""
