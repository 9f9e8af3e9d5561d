"""Train a small dense language model on the text of the examples, reading it with a DataLoader.

Both work, with the same losses:

    python examples/train_lm.py
    torchrun --nproc-per-node 4 examples/train_lm.py
"""

from collections.abc import Iterator
from pathlib import Path

import dense
import torch
from torch.utils.data import DataLoader, Dataset

import piper
from piper.strategies import parallel

TEXT = Path(__file__).parent / "data" / "paradise_lost.txt"
STEPS = 30


class Windows(Dataset):
    """Pieces of the text, in the few letters that the model knows."""

    def __init__(self) -> None:
        known = torch.tensor([byte % dense.VOCABULARY for byte in TEXT.read_bytes()])
        self.pieces = known.unfold(0, dense.LENGTH + 1, dense.LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index]
        return {"tokens": piece[:-1], "labels": piece[1:]}


def data(share: piper.Share) -> Iterator[dict[str, torch.Tensor]]:
    """One data rank's rows of each global batch: no other samples are read."""
    loader = DataLoader(Windows(), batch_size=dense.BATCH, shuffle=True, drop_last=True)
    while True:
        yield from share.of(loader)


def main() -> None:
    program = piper.trace(dense.model, dense.batch(), dense.step)
    strategy = parallel(pp=2, dp=2, zero=1, schedule="zb_h1", microbatches=4)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-2), clip=1.0)
    training = piper.train(job, data, steps=STEPS)
    assert training.loss < 0.8 * training.losses[0], "the loss did not fall"


if __name__ == "__main__":
    main()
