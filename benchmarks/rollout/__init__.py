"""Whole batches on a trace: how near the makespan comes to the least that these engines could need."""
