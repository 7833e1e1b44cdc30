"""From a run to what is wrong with it, its ranked causes and one first action. Start at ``rank.py``.

A new cause is a card in ``causes.toml``. The signs that cards name are functions in ``signs``. What people search for
is in ``symptoms.toml``.
"""
