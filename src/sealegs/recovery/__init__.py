"""From judged rows to the step that a run goes on with. Start at ``recovery.py``.

A new playbook action is a class in ``actions.py``; ``playbook_runner.py`` carries it out.
"""
