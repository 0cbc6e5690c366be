"""How far the same training drifts apart eagerly and as a graph, where it begins, and why."""
