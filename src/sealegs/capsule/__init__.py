"""A capsule is what is needed to run an incident again. ``write.py`` writes it while the run goes on."""
