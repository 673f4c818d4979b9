"""A cluster in virtual time: the real broker core between modelled callers and modelled engines."""
