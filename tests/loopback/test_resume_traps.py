"""What once went wrong when a run was saved or went on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import piper
from piper.api.job import Job
from piper.errors import FileError, RankLost, RunError
from piper.stored.folders import begin, checkpoints, commit, found_in, sweep
from piper.strategies import parallel
from piper.training.callbacks import Callbacks
from piper.training.checkpointing import Checkpoints
from piper.training.line import Log
from piper.training.lr import LearningRate
from piper.training.progress import Progress

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class _Model(nn.Module):
    """With a buffer of no elements, and maybe a parameter that no step uses."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("none", torch.zeros(0, 4))
        if unused:
            self.unused = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, self.none.to(x.dtype)]))


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


SGD = partial(torch.optim.SGD, lr=0.1)


def _job(make: Any = SGD, unused: bool = False, **degrees: Any) -> Job:
    program = piper.trace(lambda: _Model(unused), BATCH, _step)
    return program.apply(parallel(**degrees)).lower(optimizer=make)


def _trained(job: Job, folder: Path, steps: int, **more: Any) -> piper.Training:
    data = [BATCH + number for number in range(20)]
    return piper.train(
        job, data, steps=steps, launch="loopback", log="none", checkpoint=folder, **more
    )


def test_tensors_of_no_elements_come_back(tmp_path: Path) -> None:
    with _job().launch("single") as run:
        run.save(tmp_path / "saved")
    with _job().resume(tmp_path / "saved", "single") as run:
        assert run.buffers()["none"].shape == (0, 4)


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "ASGD", "Adadelta", "Rprop"])
def test_numbers_of_optimizers_keep_their_dtype(tmp_path: Path, name: str) -> None:
    job = _job(partial(getattr(torch.optim, name), lr=0.1))
    with job.launch("single") as run:
        for _ in range(2):
            run.step(BATCH)
        run.save(tmp_path / "saved")
        run.step(BATCH)
        wanted = run.parameters()
    with job.resume(tmp_path / "saved", "single") as run:
        run.step(BATCH)
        found = run.parameters()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_options_cannot_switch_on_state_that_is_not_planned(tmp_path: Path) -> None:
    with _job().launch("single") as run:
        with pytest.raises(RunError, match=r"would keep momentum_buffer with momentum=0\.9"):
            run.set_options({"momentum": 0.9})
        run.save(tmp_path / "without")
    with_momentum = _job(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    with with_momentum.launch("single") as run:
        run.set_options({"momentum": 0.0})
        run.step(BATCH)
        run.save(tmp_path / "off")  # there is no buffer yet
        run.set_options({"momentum": 0.5})
        wanted = [run.step(BATCH).loss for _ in range(3)]
    with with_momentum.resume(tmp_path / "off", "single") as run:
        run.set_options({"momentum": 0.5})
        assert [run.step(BATCH).loss for _ in range(3)] == wanted


def test_an_optimizer_that_needs_more_is_refused(tmp_path: Path) -> None:
    with _job().launch("single") as run:
        run.step(BATCH)
        run.save(tmp_path / "saved")
    more = _job(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    with pytest.raises(FileError) as refused:
        more.resume(tmp_path / "saved", "single")
    assert "layer.bias was trained without momentum_buffer" in str(refused.value)


def test_a_schedule_knows_again_what_it_has_changed() -> None:
    groups = _job(partial(torch.optim.SGD, lr=0.1, momentum=0.9)).plan.param_groups
    cycle: Callable[[Any], Any] = partial(
        torch.optim.lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, step_size_up=2,
        base_momentum=0.5, max_momentum=0.9,
    )  # fmt: skip
    before, after = LearningRate(groups, cycle), LearningRate(groups, cycle)
    for _ in range(4):
        before.advance()
    after.load_state_dict(before.state_dict())
    assert after.options == before.options
    assert after.options[0]["momentum"] == pytest.approx(0.9)


def test_tensors_that_no_step_uses_are_there_to_be_saved_again(tmp_path: Path) -> None:
    job = _job(unused=True)
    _trained(job, tmp_path / "run", 2)
    _trained(job, tmp_path / "run", 8, checkpoint_every=2, keep=1, resume=True)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000002", "step-00000008"]
    with job.resume(tmp_path / "run", "single") as run:
        assert run.steps == 8 and run.parameters()["unused"].shape == (3,)


def test_another_training_does_not_write_into_its_folder(tmp_path: Path) -> None:
    _trained(_job(), tmp_path / "run", 3)
    with pytest.raises(RunError, match="has checkpoints of another training"):
        _trained(_job(), tmp_path / "run", 2, keep=1)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-00000003"]


def test_a_step_is_saved_when_its_folder_has_its_name(tmp_path: Path) -> None:
    with _job().launch("single") as run:
        saver = Checkpoints(
            run, Log("none"), tmp_path, every=1, keep=None,
            progress=lambda states=True: Progress(), told=Callbacks([]),
        )  # fmt: skip
        run.step(BATCH)
        assert saver.after_step() and not saver.is_saved
        saver.end()
        assert saver.is_saved


def test_what_is_on_its_way_when_training_fails_is_finished(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the data ended after 20 of 30 steps"):
        _trained(_job(dp=2, zero=3), tmp_path / "run", 30, checkpoint_every=20)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000020"]


def test_what_was_about_to_be_replaced_is_put_back(tmp_path: Path) -> None:
    with _job().launch("single") as run:
        run.save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.0123abcd.replaced")
    assert found_in(tmp_path / "saved")[1].steps == 0
    (tmp_path / "saved").rename(tmp_path / ".saved.0123abcd.replaced")
    assert sweep(tmp_path) == []
    assert found_in(tmp_path / "saved")[1].steps == 0
    made = begin(tmp_path / "saved")
    (made / "piper.json").write_text("new")
    commit(made, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_part_of_a_checkpoint_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _job().launch("single") as run, monkeypatch.context() as killed:
        killed.setattr("piper.stored.folders.shutil.rmtree", lambda *_, **__: None)
        for _ in range(6):  # the last one is whole, in whatever order they are listed
            run.save(tmp_path / "saved")
    whole = tmp_path / ".saved.0123abcd.replaced"
    (tmp_path / "saved").rename(whole)
    assert len(sweep(tmp_path)) == 5
    with _job().resume(tmp_path / "saved", "single") as run:
        assert run.steps == 0
    (tmp_path / "saved").rename(whole)

    def late(old: Path, new: Path) -> None:
        old.replace(new)  # another rank was there before
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("piper.stored.folders.os.rename", late)
    assert found_in(tmp_path / "saved")[1].steps == 0


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with _job().launch("single") as run, pytest.raises(FileError, match="is a file"):
        run.save(tmp_path / "file")


def test_steps_are_counted_over_several_trainings_of_a_run(tmp_path: Path) -> None:
    job = _job()
    with job.launch("loopback") as run:
        for _ in range(2):
            piper.train(run, [BATCH] * 3, steps=3, log="none")
        piper.train(run, [BATCH] * 2, steps=2, log="none", checkpoint=tmp_path / "run")
        assert run.steps == 8
    found = _trained(job, tmp_path / "run", 10, resume=True)
    assert [record.step for record in found.records][-2:] == [9, 10]


def test_a_generator_of_the_users_gives_every_share_the_same_order() -> None:
    seen: list[int] = []

    def data(share: piper.Share) -> Any:
        return share.of(loader)

    samples = [(BATCH[0] * 0 + number, number) for number in range(16)]
    generator = torch.Generator().manual_seed(5)

    def collate(rows: list[Any]) -> torch.Tensor:
        seen.extend(number for _, number in rows)
        return torch.stack([row for row, _ in rows])

    loader = DataLoader(
        samples, batch_size=8, shuffle=True, generator=generator, collate_fn=collate
    )
    piper.train(_job(dp=2), data, steps=2, launch="loopback", log="none")
    assert sorted(seen) == list(range(16))
    assert seen != sorted(seen)


class _Always(nn.Module):
    """Dropout that evaluation does not turn off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5)


def test_evaluations_draw_the_numbers_that_they_would_have(tmp_path: Path) -> None:
    job = piper.trace(_Always, BATCH, _step).apply(parallel(dp=2)).lower()
    with job.launch("loopback") as run:
        run.step(BATCH)
        first = [run.evaluate(BATCH).loss for _ in range(2)]
        run.save(tmp_path / "saved")
        wanted = [run.evaluate(BATCH).loss, run.step(BATCH).loss]
    with job.resume(tmp_path / "saved", "loopback") as run:
        assert [run.evaluate(BATCH).loss, run.step(BATCH).loss] == wanted
    assert len({*first, wanted[0]}) == 3


class _Loses:
    """A callback with which the training loses a rank after so many steps, once."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: list[int] = []

    def on_step(self, record: Any) -> None:
        self.seen.append(record.step)
        if self.seen.count(self.step) == 1 and record.step == self.step:
            raise RankLost("rank 1 was lost", ranks=[1], survivors=[])


def _elastic() -> piper.Elastic:
    jobs = {1: _job(microbatches=2), 2: _job(dp=2)}
    return piper.Elastic(jobs.get, ranks=2)


def test_an_elastic_training_goes_on_after_its_start(tmp_path: Path) -> None:
    """Each attempt once began where the first had."""
    with _job(dp=2).launch("loopback") as run:
        before = piper.train(run, [BATCH] * 20, steps=3, log="none")
    start = Progress(position=before.position, records=tuple(before.records))
    loses = _Loses(6)
    found = piper.train(
        _elastic(), [BATCH] * 20, steps=8, launch="loopback", log="none", start=start,
        checkpoint=tmp_path / "run", checkpoint_every=1, callbacks=[loses],
    )  # fmt: skip
    assert loses.seen in (
        [4, 5, 6, 6, 7, 8],
        [4, 5, 6, 5, 6, 7, 8],
    )  # the last save may be on its way
    assert [record.step for record in found.records] == list(range(1, 9))


def test_a_request_to_end_is_heard_where_training_would_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import piper.training.loop as loop

    loses = _Loses(2)

    @contextlib.contextmanager
    def asked(run: Any) -> Iterator[Callable[[], bool]]:
        yield lambda: run.plan.mesh.size == 1 and len(loses.seen) == 5

    monkeypatch.setattr(loop, "heeding_termination", asked)
    found = piper.train(
        _elastic(), [BATCH] * 20, steps=8, launch="loopback", log="none",
        checkpoint=tmp_path / "run", checkpoint_every=4, callbacks=[loses],
    )  # fmt: skip
    assert loses.seen == [1, 2, 1, 2, 3]
    assert found.stopped and checkpoints(tmp_path / "run")[-1].name == "step-00000003"


def test_three_losses_in_a_row_are_an_error(tmp_path: Path) -> None:
    starts: list[dict[str, Any]] = []

    class Never:
        def on_start(self, facts: dict[str, Any]) -> None:
            starts.append(facts)
            raise RankLost("rank 0 was lost", ranks=[0], survivors=[])

    with pytest.raises(RankLost, match="rank 0 was lost"):
        piper.train(
            _elastic(), [BATCH] * 4, steps=4, launch="loopback", log="none",
            checkpoint=tmp_path / "run", callbacks=[Never()],
        )  # fmt: skip
    assert [facts["ranks"] for facts in starts] == [2, 1, 2]
