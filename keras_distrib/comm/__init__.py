"""Reductions, gathers and collectives over replicas."""
