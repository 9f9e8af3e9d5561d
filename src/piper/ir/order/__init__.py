"""What comes before what: orders, turns and topological facts."""
