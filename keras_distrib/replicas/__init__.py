"""Running one function on N replicas: threads, meetings, and each replica's state."""
