"""Saving: a run's state, written by its ranks beside the work; its folder appears when it is whole."""

from __future__ import annotations

import importlib
import os
import reprlib
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from piper.errors import Call, FileError, RunError, user_source
from piper.files import check_path, write_bytes
from piper.runtime.state.write_pieces import Written
from piper.stored import manifest
from piper.stored.folders import begin, commit, sync
from piper.stored.manifest import Manifest, manifest_of
from piper.stored.stored_pieces import StoredTensor
from piper.stored.writers import Entry, entries_by_rank

if TYPE_CHECKING:
    from piper.api.run import Run

LOOK_SECONDS = 0.01


class Saving:
    """A checkpoint on its way. `done` looks, `wait` waits; either gives the folder its name when all
    ranks have written, and raises FileError, once, if one could not."""

    def __init__(
        self,
        run: Run,
        folder: str | os.PathLike[str],
        training: Mapping[str, Any],
        survivors: Sequence[int] | None = None,
    ) -> None:
        check_path(folder, "run.save")
        _check_training(training)
        self.run = run
        self.folder = Path(os.path.abspath(folder))
        self.steps, self.evaluations = run.steps, run.evaluations
        self.training = dict(training)
        self.survivors = survivors  # who writes, after a failure
        self.finished = False
        self.num_bytes = 0
        self._options = [dict(each) for each in run.workers.now]
        # Torch's part of it takes a second to import, which can be while ranks write.
        metadata = "piper.runtime.state.torch_metadata"
        threading.Thread(target=importlib.import_module, args=(metadata,), daemon=True).start()
        self._made = Path(run.agreed(lambda: str(begin(self.folder))))
        began = time.perf_counter()
        entries = _entries(run, survivors)
        self.rank_seconds = run.workers.save(entries, str(self._made), survivors)
        self.seconds = time.perf_counter() - began  # for which training waited

    def done(self) -> bool:
        if not self.finished:
            written = self.run.workers.saved(self.survivors)
            if written is not None:
                self.finished = True
                self.num_bytes = self.run.agreed(lambda: self._finish(written))
        return self.finished

    def wait(self) -> Path:
        while not self.done():
            time.sleep(LOOK_SECONDS)
        return self.folder

    def abandon(self) -> None:
        """Remove what was written so far; nobody may go on writing."""
        shutil.rmtree(self._made, ignore_errors=True)

    def _finish(self, written: list[dict[str, Any]]) -> int:
        """Give the folder its name, in one process; the bytes of its tensors."""
        from piper.runtime.state import torch_metadata

        try:
            failures = [answer["failure"] for answer in written if answer["failure"]]
            if failures:
                raise FileError(failures[0], details=failures[1:])
            found = self._manifest([answer["tensors"] for answer in written])
            self._check(found)
            self._write(torch_metadata.NAME, torch_metadata.torch_metadata(found))
            self._write(manifest.NAME, manifest.encoded(found))
            commit(self._made, self.folder)
        except OSError as problem:
            shutil.rmtree(self._made, ignore_errors=True)
            reason = problem.strerror or problem
            raise FileError(f"{self.folder} cannot be written: {reason}") from None
        except BaseException:
            shutil.rmtree(self._made, ignore_errors=True)
            raise
        return found.num_bytes

    def _manifest(self, written: list[bytes]) -> Manifest:
        parts: dict[tuple[str, ...], list[StoredTensor]] = defaultdict(list)
        for data in written:
            for path, tensor in msgspec.json.decode(data, type=list[Written]):
                parts[path].append(tensor)
        tensors = {".".join(path): _joined(found) for path, found in sorted(parts.items())}
        return manifest_of(
            self.run.plan,
            piper=_version(),
            steps=self.steps,
            evaluations=self.evaluations,
            options=self._options,
            tensors=tensors,
            paths={".".join(path): path for path in sorted(parts)},
            training=self.training,
        )

    def _check(self, found: Manifest) -> None:
        """All files must be seen from here, as long as their ranks say."""
        ends: dict[str, int] = {}
        for tensor in found.tensors.values():
            for piece in tensor.pieces:
                ends[piece.file] = max(ends.get(piece.file, 0), piece.offset + piece.length)
        for file, end in ends.items():
            path = self._made / file
            if not path.is_file() or path.stat().st_size != end:
                raise FileError(
                    f"{path} is not as its rank has written it",
                    legal="a folder that is the same on all machines of the run",
                )

    def _write(self, name: str, data: bytes) -> None:
        write_bytes(self._made / name, data)
        sync(self._made / name)


def _check_training(training: Mapping[str, Any]) -> None:
    """Raise before anything is written, where a manifest cannot hold it."""
    try:
        msgspec.json.encode(dict(training))
    except (TypeError, ValueError) as error:
        raise RunError(
            f"training={reprlib.repr(training)}: {error}",
            call=Call("run.save", user_source()),
            legal="a dictionary of numbers, texts, lists and dictionaries",
        ) from None


def _joined(parts: list[StoredTensor]) -> StoredTensor:
    """One tensor, of which ranks have written parts."""
    pieces = sorted((p for part in parts for p in part.pieces), key=lambda p: p.box.start)
    return msgspec.structs.replace(parts[0], pieces=tuple(pieces))


def _entries(run: Run, ranks: Sequence[int] | None) -> list[list[Entry]]:
    """Who writes what; before the first step optimizers keep nothing."""
    found = run.entries if ranks is None else entries_by_rank(run.plan, ranks)
    if run.steps:
        return found
    return [[entry for entry in mine if entry.section == "model"] for mine in found]


def _version() -> str:
    import piper

    return piper.__version__
