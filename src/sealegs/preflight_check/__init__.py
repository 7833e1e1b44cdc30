"""Checks the plan of a run before it starts. Start at ``rule.py``.

A new rule is a function in the module of its family, ``rules_data.py`` and so on, with its page as docstring.
"""
