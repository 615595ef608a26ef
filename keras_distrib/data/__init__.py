"""Splitting batches over replicas, and distributed datasets."""
