"""One thread per process: ranks and test workers share few cores."""

import torch

torch.set_num_threads(1)
