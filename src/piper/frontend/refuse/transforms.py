"""Function transforms: refused before anything runs their nodes, which would leave torch inside one."""

from __future__ import annotations

from torch import fx

from piper.bodies.captured_nodes import source_of
from piper.errors import TraceError

_BEGIN = {
    "_vmap_increment_nesting": "torch.vmap",
    "_grad_increment_nesting": "torch.func.grad",
    "_jvp_increment_nesting": "torch.func.jvp",
}


def refuse_transforms(graph: fx.Graph) -> None:
    """Raise at the first node that begins a transform."""
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        transform = _BEGIN.get(getattr(node.target, "__name__", ""))
        if transform:
            # Its own frames are torch's; the code inside of it is the user's.
            source = next((s for n in nodes[index:] if (s := source_of(n))), None)
            raise TraceError(
                f"{transform} is not supported ({source})",
                legal="operators that take the whole batch: x @ w.T, torch.bmm, torch.einsum"
                if transform == "torch.vmap"
                else "the derivative written out, or a step without it",
            )
