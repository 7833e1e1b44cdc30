"""The guard in a program that does not know of it: what ``sealegs run`` brings into the processes that it starts.

``startup/sitecustomize.py`` runs as Python starts, and waits for a framework to be imported. ``hooks.py`` then wraps
the call that trains: ``trainer.py``, ``fit.py`` and ``accelerate_loop.py`` put the guard into the loop behind it. What
cannot be guarded runs on as it is, and ``request.py`` tells the command why.
"""
