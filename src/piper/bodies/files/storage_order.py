"""storage_order: the pickle of a torch.save file in, its storages in the order of their naming out."""

from __future__ import annotations

import pickletools
from typing import Any

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_GETS = ("GET", "BINGET", "LONG_BINGET")


def storage_order(pickled: bytes) -> list[str]:
    """Each storage once. It is the third of a tuple ("storage", type, key, device, size)."""
    memo: dict[Any, Any] = {}
    pushed: list[Any] = []  # since the last mark; what is not a plain value stands as None
    found: dict[str, None] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in _PUTS:
            memo[argument] = pushed[-1] if pushed else None
        elif name == "MEMOIZE":
            memo[len(memo)] = pushed[-1] if pushed else None
        elif name in _GETS:
            pushed.append(memo.get(argument))
        elif name == "MARK":
            pushed = []
        elif name == "TUPLE":
            pushed = [tuple(pushed)]
        elif name == "BINPERSID":
            identity = pushed[-1] if pushed else None
            if isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage":
                found[str(identity[2])] = None
        else:
            pushed.append(argument)
    return list(found)
