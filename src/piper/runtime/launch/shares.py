"""Shares: which rows of the global batch belong to which data rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from piper.bodies.leaves import batch_constants, batch_leaves, users_name
from piper.errors import RunError
from piper.ir.tensor_type import Shapes, shapes_text
from piper.plan.types import Plan
from piper.runtime.launch.epochs import Epochs


def share_of(plan: Plan, leaves: Mapping[str, Tensor], data_rank: int) -> dict[str, Tensor]:
    """Sample i of a batch of B belongs to data rank i // (B / D)."""
    found = {}
    for name, leaf in leaves.items():
        rows = leaf.shape[0] // plan.num_data_ranks
        found[name] = leaf[data_rank * rows : (data_rank + 1) * rows]
    return found


def rows_of(plan: Plan, leaves: Mapping[str, Tensor], data_rank: int) -> Mapping[str, Tensor]:
    """A data rank's rows of a global batch; what has other sizes is taken for its rows already."""
    whole = all(leaves[name].shape[0] == leaf.shape[0] for name, leaf in plan.batch.items())
    return share_of(plan, leaves, data_rank) if whole else leaves


def checked_leaves(plan: Plan, batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch, if they are like those of the example batch but for their sizes."""
    leaves = batch_leaves(batch)
    rows: dict[str, int] = {}
    for name, wanted in plan.batch.items():
        if name not in leaves:
            wanted_names = ", ".join(f"{users_name(n)} {leaf}" for n, leaf in plan.batch.items())
            found = ", ".join(map(users_name, leaves)) or "no tensors"
            raise RunError(
                f"the batch has no {users_name(name)}: it is a {type(batch).__name__} with {found}",
                legal=f"{wanted_names}, as in the example batch",
            )
        leaf = leaves[name]
        dtype = str(leaf.dtype).removeprefix("torch.")
        cast = wanted.dtype == "bfloat16" and leaf.is_floating_point()
        if leaf.dim() != len(wanted.shape) or (dtype != wanted.dtype and not cast):
            legal = f"{wanted.dtype}{list(wanted.shape)} as in the example batch, or other sizes"
            if leaf.dim() == len(wanted.shape) - 1:
                legal += "; of single samples, DataLoader(dataset, batch_size=...) makes batches"
            raise RunError(f"{users_name(name)} is {dtype}{list(leaf.shape)}", legal=legal)
        rows[name] = leaf.shape[0]
    if len(set(rows.values())) > 1:
        raise RunError(
            "the tensors of the batch differ in their number of samples",
            details=[f"{users_name(name)}: {num}" for name, num in rows.items()],
            legal="a row for each sample in every tensor",
        )
    given, traced = batch_constants(batch), plan.batch_constants
    if given != traced:
        name = next(n for n in (*traced, *given) if given.get(n) != traced.get(n))
        raise RunError(
            f"{users_name(name)} is {given.get(name, 'missing')}, but it was traced as "
            f"{traced.get(name, 'missing')}",
            legal="what changes from step to step as a tensor",
        )
    return leaves


def refuse_replicas(loader: DataLoader[Any]) -> None:
    """Raise for a loader of one replica's samples, of which others would then be given a part."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise RunError(
            f"the loader's DistributedSampler leaves out the samples of {sampler.num_replicas - 1} of "
            f"{sampler.num_replicas} replicas",
            legal="a DataLoader of all samples, such as shuffle=True: ranks are given their own rows",
        )


def shapes_of(plan: Plan, leaves: Mapping[str, Tensor], *, parts: int = 1) -> Shapes:
    """Of the global batch that these are the leaves of, or those of one of its `parts`."""
    shapes = ((name, leaves[name].shape) for name in plan.batch)
    return tuple((name, (rows * parts, *sizes)) for name, (rows, *sizes) in shapes)


def agreed_shapes(by_rank: Mapping[int, Shapes]) -> Shapes:
    """Of a global batch, by the shares of it that ranks have read."""
    first, *others = by_rank
    for rank in others:
        if by_rank[rank] != by_rank[first]:
            raise RunError(
                "the shares of a batch differ in their shape",
                details=[f"rank {r}: of {shapes_text(by_rank[r])}" for r in (first, rank)],
                legal="shares of as many rows, padded to one length over all data ranks",
            )
    return by_rank[first]


class Share:
    """The part of every global batch that data rank `rank` of `num_ranks` reads.

    The n-th batches of all shares together are the n-th global batch. `start` is how many samples of
    the global batches were trained on before: a data function that looks at it begins after them.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        seed: int = 0,
        start: int = 0,
        *,
        epochs: Epochs | None = None,
        whole: int = 0,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.seed = seed
        self.epochs = epochs or Epochs(seed=seed, sample=start)
        self._whole = whole  # smaller batches that do not divide are left out
        self._start = start
        self._looked_at = False

    @property
    def start(self) -> int:
        self._looked_at = True
        self._check_one_way()
        return self._start

    @property
    def looked_at(self) -> bool:
        """Whether its reader begins by itself."""
        return self._looked_at

    @property
    def begins(self) -> bool:
        """Whether what reads it begins after the samples that were trained on."""
        return self._looked_at or self.epochs.used

    def rows(self, size: int) -> slice:
        """Which samples of a global batch of `size`."""
        if size % self.num_ranks:
            raise RunError(
                f"a batch of {size} samples for {self.num_ranks} data ranks",
                legal=f"a multiple of {self.num_ranks}; DataLoader(..., drop_last=True)",
            )
        rows = size // self.num_ranks
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def of(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A loader of this share of the global batches of `loader`; no other samples are read.

        It begins after `start`. Every rank sees the batches in the same order: a sampler that shuffles
        without a generator of its own is given one with the share's seed, another in each epoch.
        """
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            what = "an IterableDataset" if loader.batch_sampler is not None else "batch_size=None"
            raise RunError(
                f"a DataLoader with {what} cannot skip the samples of other ranks",
                legal="a map-style dataset with batch_size=..., or a data function that yields this "
                "rank's rows itself",
            )
        refuse_replicas(loader)
        self.epochs.used = True
        self._check_one_way()
        return self.epochs.loader(loader, self._rows)

    def _rows(self, size: int) -> slice | None:
        return None if size < self._whole and size % self.num_ranks else self.rows(size)

    def _check_one_way(self) -> None:
        if self._looked_at and self.epochs.used:
            raise RunError(
                "the data function reads share.start, after which share.of(loader) begins by itself",
                legal="one of the two",
            )

    def __repr__(self) -> str:
        return f"Share({self.rank}, {self.num_ranks}, seed={self.seed}, start={self._start})"
