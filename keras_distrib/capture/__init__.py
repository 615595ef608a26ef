"""Steps that are traced once into a graph, and replayed."""
