"""Runs an incident again with one thing changed at a time, to test its causes. Start at ``experiment.py``.

A new rerun is an arm in ``arms.py``; ``tested_causes.py`` judges causes by the outcomes.
"""
