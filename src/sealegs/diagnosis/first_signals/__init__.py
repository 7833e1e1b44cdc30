"""A run whose loss tells little in, what stands in the signals that tell first out, with a module a kind."""
