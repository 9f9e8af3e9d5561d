"""Groups of an optimizer as torch takes them, a list, where piper.adamw takes patterns of names."""

from _first import Model, batch, step

import piper

groups = [{"params": ["first.bias"], "weight_decay": 0.0}]
piper.trace(Model, batch(), step).lower(optimizer=piper.adamw(lr=1e-3, groups=groups))
