"""Weights of another model: a name is missing, one is surplus, two are of another shape."""

import torch
from _model import batch, model, step

import piper

state = model().state_dict()
state["extra.bias"] = state.pop("first.bias")
state["second.weight"] = torch.zeros(6, 5)
state["experts.weight"] = torch.zeros(2, 6, 6)

piper.trace(model, batch(), step).lower(weights=state)
