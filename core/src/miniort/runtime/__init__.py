"""Running a graph: who gets each node, the compiled plan, and the session."""
