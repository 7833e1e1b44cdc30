"""Incidents of training that anybody can run again: what each one is, its runs, and the pages about what came out."""
