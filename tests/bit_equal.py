"""Two trees of the project in; whether the matrix's cases train bit for bit alike in both, out.

git worktree add /tmp/before COMMIT
python -m tests.bit_equal /tmp/before            # all cases
python -m tests.bit_equal /tmp/before --every 20 # one of twenty
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
# Runs in each tree, with that tree's package, models and cases. Prints a line of JSON a case: its
# losses as hexadecimal numbers and a hash of all parameters after the last step.
_CHILD = """
import hashlib, json, sys, warnings
import torch
from tests.matrix import CELLS, LONG
from tests.zoo import batches_of
torch.set_num_threads(1)
warnings.simplefilter("ignore")
every, part, parts = map(int, sys.argv[1:])
cells = (CELLS + LONG)[::every][part::parts]
for cell in cells:
    with cell.job().launch("loopback") as run:
        losses = [run.step(batch).loss.hex() for batch in batches_of(cell.program)]
        whole = run.parameters()
    digest = hashlib.sha256()
    for name in sorted(whole):
        digest.update(whole[name].detach().contiguous().numpy().tobytes())
    print(json.dumps([cell.name, losses, digest.hexdigest()[:16]]), flush=True)
"""


def start(tree: Path, every: int, part: int, parts: int) -> subprocess.Popen[str]:
    path = [str(tree / "src"), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"}

    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, *map(str, (every, part, parts))],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def results(child: subprocess.Popen[str]) -> dict[str, list[object]]:
    assert child.stdout is not None
    found = {}
    for line in child.stdout:
        name, *rest = json.loads(line)
        found[name] = rest
    if child.wait():
        sys.exit(f"a tree failed with {child.returncode}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the tree to compare with")
    parser.add_argument("--every", type=int, default=1, help="only one case of so many")
    parser.add_argument("--processes", type=int, default=1, help="for each tree")
    arguments = parser.parse_args()
    trees = (HERE, arguments.other.resolve())
    parts = arguments.processes
    children = [
        [start(tree, arguments.every, part, parts) for part in range(parts)] for tree in trees
    ]
    mine, theirs = (
        {k: v for child in each for k, v in results(child).items()} for each in children
    )
    different = [name for name in mine if mine[name] != theirs.get(name)]
    different += [name for name in theirs if name not in mine]
    for name in different:
        print(f"{name}: {mine.get(name)} here, {theirs.get(name)} there")
    print(f"{len(mine) - len(different)} of {len(mine)} cases are bit-equal")
    return 1 if different or not mine else 0


if __name__ == "__main__":
    sys.exit(main())
