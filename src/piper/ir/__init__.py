"""The intermediate representation: Values, nodes, the Graph, selectors, text and JSON."""
