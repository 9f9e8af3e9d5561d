"""The training loop: a job and data in, trained parameters on the workers and a record of it out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import IO, Any

import msgspec
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from piper.api.job import Job
from piper.api.run import Run
from piper.api.step_result import StepResult, StepUnderWay
from piper.errors import Call, RunError, naming_arguments, naming_line, user_source
from piper.plan.types import Plan
from piper.runtime.launch.marks import decoded, encoded
from piper.runtime.launch.pool import Pool
from piper.runtime.launch.read_faults import ReadPolicy
from piper.runtime.launch.reading import reference
from piper.training.callbacks import Callbacks
from piper.training.checkpointing import (
    Checkpoints,
    check_settings,
    heeding_termination,
    progress_of,
    surviving,
)
from piper.training.data import (
    Batches,
    Last,
    check_again,
    check_data,
    check_epochs,
    check_policy,
    rewinding,
)
from piper.training.elastic import Attempt, Elastic, attempts
from piper.training.line import Log
from piper.training.lr import LearningRate, check_schedule
from piper.training.mean_results import Mean
from piper.training.meter import Meter, unit_of
from piper.training.nan_guard import NanGuard, OnNan, check_on_nan
from piper.training.notices import Notices
from piper.training.opening import (
    check_ahead,
    check_importable,
    check_job,
    check_options,
    check_steps,
    opened,
    speaks,
)
from piper.training.position import Position
from piper.training.progress import Progress
from piper.training.recorded_steps import RecordedSteps, checked_steps
from piper.training.records import Record, Training
from piper.training.watch import Watch, watched_at


@naming_arguments
def train(
    job: Job | Run | Elastic,
    data: Any,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    last: Last = "train",
    launch: str | Pool = "auto",
    lr_schedule: Callable[[Any], Any] | None = None,
    evaluate: Any = None,
    evaluate_every: int = 0,
    log: str | IO[str] = "auto",
    log_every: int = 1,
    callbacks: Sequence[Any] = (),
    on_nan: OnNan = "go on",
    read_again: int = 0,
    skip_unreadable: int = 0,
    start: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    resume: bool = False,
    record: str | os.PathLike[str] | None = None,
    record_steps: str | range | None = None,
    watch: bool | str = False,
    watch_every: int | None = None,
    ahead: bool = False,
    **launch_options: Any,
) -> Training:
    """Train for `steps` steps, or for `epochs` passes through the data; with neither, until it ends.

    `data` is an iterable of global batches, a DataLoader of them, or a function `data(share)` that
    gives the batches of one data rank, which each rank then reads for itself. `launch` and
    `launch_options` are those of `job.launch`; "auto" is torchrun in a script that it runs, else local
    processes. A Run is used and left open. `lr_schedule` makes a torch scheduler for an optimizer with
    the groups of the job's; it is called for each, where there are several.
    `evaluate` is data as above, which ends; its loss is measured every `evaluate_every` steps and at
    the end. `log` is "auto", "text", "json" or "none", or an open file for lines of JSON; under torchrun
    rank 0 prints. It has every `log_every`th step, the first, the last and those that are not finite.
    `callbacks` are told of each step and more (`piper.Callback`); one that raises ends the training.
    `on_nan` says what becomes of gradients that are not finite. "go on" trains, with one warning. "skip"
    leaves the batch out, as if it had never been there: parameters, optimizer state, buffers, the number
    of steps and the schedule stay as they are, on every rank. "stop" is an error that names the first
    task that made such a value. Both need the norm of gradients: `lower(clip=...)`, where `math.inf`
    clips nothing. Without it "stop" ends after the step, by the loss alone.
    A batch that is smaller than the example batch, as the last one of an epoch may be, is trained on as
    one step of its own if its rows divide by data ranks x microbatches, and else left out with a
    warning; `last="drop"` leaves all of them out.
    Data that raises is read again up to `read_again` times; then up to `skip_unreadable` batches are
    left out, by all ranks together, before it is an error.
    `start` is the progress of a loop that trained the same parameters before: this one goes on with the
    next sample, in all `steps` steps.
    In the folder `checkpoint` the run is saved every `checkpoint_every` steps, beside the coming ones,
    at the end, and when the process is asked to end (SIGTERM); the latest `keep` stay, or all. With
    `resume` it goes on from the latest one there, whatever strategy that was saved under. Of an Elastic
    it goes on, with the ranks that are left, when some are lost.
    `record` is a file for the Timeline of `record_steps`: "20:23" are the steps 20, 21 and 22.
    With `watch` a browser on this machine follows the training at the address that is printed, or where
    "HOST:PORT" says. One step in `watch_every` is recorded for it, by default as many as take a
    hundredth of the time; 0 records none.
    With `ahead` a step begins before the line of the one before is written and callbacks are told of
    it, where nothing else is to be done between them, so that a GPU does not wait for this process.
    """
    with naming_line("train"):
        check_job(job)
        check_options(launch_options, signature(train).parameters)
        check_steps(steps, evaluate, evaluate_every)
        check_epochs(data, steps, epochs, last)
        policy = ReadPolicy(read_again, skip_unreadable, epochs or 1, last)
        check_on_nan(on_nan)
        check_schedule(lr_schedule)
        if not isinstance(log_every, int) or log_every < 1:
            raise RunError(f"log_every={log_every!r}", legal="steps between lines, at least 1")
        check_settings(checkpoint, checkpoint_every, keep, resume)
        check_data(data)
        check_policy(data, policy)
        address = watched_at(watch, watch_every, log)
        check_ahead(ahead, job, launch)
    recorder = RecordedSteps(record, checked_steps(record, record_steps, steps))

    told = Callbacks(callbacks)
    with naming_line("train"):
        check_importable(job, launch, data)
        view = Watch(address, watch_every, speaks=speaks(job, launch))

    def once(job: Job | Run, attempt: Attempt | None) -> Training:
        told.silent = not speaks(job, launch)
        before = checkpoint if resume or attempt else None
        with opened(job, launch, log, launch_options, before, view) as (run, lines):
            lines.every = log_every
            begun = progress_of(run) if run.resumed else start or Progress()
            recorder.begin(run, lines)
            guard = NanGuard(run, on_nan)
            loop = _Loop(run, lines, steps, lr_schedule, guard, begun, told, policy, recorder, view)
            loop.ahead = ahead
            if checkpoint is None:
                return loop.train(data, evaluate, evaluate_every)
            every = checkpoint_every or 0
            saver = Checkpoints(
                run,
                lines,
                checkpoint,
                every=every,
                keep=keep,
                progress=loop.progress,
                told=told,
            )
            with heeding_termination(run) as asked_to_end, surviving(saver, attempt):
                return loop.train(data, evaluate, evaluate_every, saver, asked_to_end, attempt)

    def surviving_losses(elastic: Elastic) -> Training:
        if checkpoint is None:
            raise RunError(
                "an Elastic without checkpoints", legal='checkpoint="DIR" (--checkpoint DIR)'
            )
        check_again(data)
        rewind = rewinding(data)

        def again(attempt: Attempt) -> Training:
            rewind()
            return once(attempt.job, attempt)

        return attempts(elastic, again)

    try:
        return surviving_losses(job) if isinstance(job, Elastic) else once(job, None)
    except BaseException as error:
        view.failed(error)
        told.fail(error)
        raise
    finally:
        view.close()


@dataclass(frozen=True)
class _Step:
    """Its learning rate and its plan; how often reading its batch was tried again, and how many were
    left out before it."""

    lr: float
    plan: Plan
    unread: tuple[int, int]


class _Loop:
    """One training run: what the steps have in common, and their records."""

    def __init__(
        self,
        run: Run,
        lines: Log,
        steps: int | None,
        lr_schedule: Callable[[Any], Any] | None,
        guard: NanGuard,
        start: Progress,
        callbacks: Callbacks,
        policy: ReadPolicy,
        recorder: RecordedSteps,
        watch: Watch,
    ) -> None:
        self.run = run
        self.lines = lines
        self.callbacks = callbacks
        if run.workers.reading == "rank":  # others shall not say that this one was lost
            pool: Any = run.workers.pool
            callbacks.before_raising = pool.speak
        self.policy = policy
        self.recorder = recorder
        self.watch = watch
        self.start = start
        self.steps = steps
        before = start.position.steps
        self.meter = Meter(run, None if steps is None else max(0, steps - before))
        with naming_line("train"):
            self.rate = LearningRate(run.plan.param_groups, lr_schedule or _constant)
        self.scheduled = lr_schedule is not None
        if self.scheduled and start.schedule is not None:
            self.rate.load_state_dict(decoded(start.schedule))
        elif self.scheduled:
            for _ in range(before):
                self.rate.advance()
        self.guard = guard
        self.notices = Notices(run, lines, policy)
        self.options: list[dict[str, Any]] = []  # what parameter groups were set to last
        self.training = Training(self.meter.unit, list(start.records))
        self.begun = self.since = time.perf_counter()
        self.batches: Batches | None = None
        self.ahead = False  # whether a step may begin before the result of the last is asked for
        self.under_way: tuple[StepUnderWay, _Step] | None = None

    @property
    def done(self) -> int:
        """Steps, with those before this loop."""
        return self.start.position.steps + self.meter.num

    def train(
        self,
        data: Any,
        evaluate: Any,
        evaluate_every: int,
        saver: Checkpoints | None = None,
        asked_to_end: Callable[[], bool] = lambda: False,
        attempt: Attempt | None = None,
    ) -> Training:
        """All steps that are left, or those until the process is asked to end, or could have more
        ranks."""
        if evaluate is not None:
            _prepare_evaluation(self.run, evaluate)
        facts = self._facts()
        self.watch.begin(self.run, facts, self.training.records)
        self.callbacks.tell("on_start", facts)
        self.batches = Batches(self.run, data, start=self.start.position, policy=self.policy)
        # Evaluation is compiled, and files of data are imported: the first step has neither in it.
        self.begun = self.since = time.perf_counter()
        for batch in self._until_done(self.batches):
            if self._goes_ahead(evaluate_every, saver, attempt) and not asked_to_end():
                self.begin(batch)
                continue
            if not self.step(batch):
                continue
            if saver and self.meter.num == 1:
                self.progress()  # what cannot be saved is an error now, not at the last step
            if evaluate_every and self.done % evaluate_every == 0:
                self.evaluate(evaluate)
            if attempt and (text := attempt.stepped(self.done)):
                self.lines.note(text)
            due = saver.after_step() if saver else False
            if asked_to_end():
                self.training.stopped = True
                break
            if saver and due and attempt and attempt.wants_more():
                saver.save()
                if saver.is_saved:
                    self.lines.note(f"more ranks are there: launched again after step {self.done}")
                    attempt.outgrown = True
                    return self.training
        if self.under_way is not None:
            self.end_begun()
            self.training.stopped = asked_to_end()
        if self.steps is not None and self.done < self.steps and not self.training.stopped:
            raise RunError(
                f"the data ended after {self.done} of {self.steps} steps",
                call=Call("train", user_source()),
                legal="steps=None: until the data ends; or data that begins again",
            )
        self.notices.partial(self.batches.faults, self.done)
        if not self.meter.num and self.batches.faults.partial:
            raise RunError(
                "all batches of the data are smaller than the example batch, and were left out",
                call=Call("train", user_source()),
                legal="batches of the example batch's size, or an example batch of theirs",
            )
        if saver:
            saver.end()
            self.training.saved = saver.is_saved
        self.recorder.end()
        if self.training.stopped:
            saved = "saved" if self.training.saved else "not saved"
            self.lines.note(f"asked to end: stopped after step {self.done}, which is {saved}")
        elif evaluate is not None and self.meter.num and not self._evaluated:
            self.evaluate(evaluate)
        return self.end()

    def _until_done(self, batches: Batches) -> Iterator[Any]:
        """A batch for each step that is left; those that are skipped do not count."""
        while self.meter.steps is None or self._num_begun < self.meter.steps:
            try:
                with naming_line("train"):
                    batch = next(batches)
            except StopIteration:
                return
            except BaseException:
                self._end_last()
                raise
            yield batch

    @property
    def _num_begun(self) -> int:
        """Steps of this loop."""
        return self.meter.num + (self.under_way is not None)

    def _goes_ahead(
        self, evaluate_every: int, saver: Checkpoints | None, attempt: Attempt | None
    ) -> bool:
        """Whether nobody asks for the coming step before the one behind it begins."""
        if self._num_begun == 0 or not self.ahead:
            return False
        number = self.start.position.steps + self._num_begun + 1
        evaluates = evaluate_every and number % evaluate_every == 0
        saves = saver and saver.waits
        told = self.recorder.waits or self.watch.waits
        return not (evaluates or saves or told or self.guard.waits or self.rate.waits or attempt)

    @property
    def _evaluated(self) -> bool:
        """Whether the last step's record has an evaluation."""
        return self.training.records[-1].evaluation is not None

    def _facts(self) -> dict[str, Any]:
        plan = self.run.plan
        return {
            "step": self.done,
            "steps": self.steps,
            "ranks": plan.mesh.size,
            "mesh": str(plan.mesh),
            "plan": plan.content_hash(),
            "unit": self.meter.unit,
        }

    def progress(self, *, states: bool = True) -> Progress:
        """What another loop needs to go on from here; under torchrun every rank asks. Without the
        `states` of loaders no rank is asked."""
        return Progress(
            position=self.position(states=states),
            schedule=encoded(self.rate.state_dict()) if self.scheduled else None,
            records=tuple(self.training.records),
            seconds=self.seconds,
        )

    def position(self, *, states: bool = True) -> Position:
        return self.batches.position(states=states) if self.batches else self.start.position

    @property
    def seconds(self) -> float:
        return self.start.seconds + time.perf_counter() - self.begun

    def step(self, batch: Any) -> bool:
        """One step and its line; False if it was skipped. Its time is that since the last one, so that
        reading data counts."""
        self.end_begun()
        lr, number = self._set_options(), self.done + 1
        self.recorder.before_step(number)
        self.watch.before_step(number)
        result = self.guard.step(batch, number)
        self.recorder.after_step()
        self.watch.after_step(number)
        if self.batches:
            self.batches.trained(skipped=result.skipped)
        if result.skipped:
            self.lines.warning(number, self.guard.text(result))
            return False
        if self.scheduled:
            self.rate.advance(result.loss)
        self._took(result, _Step(lr, self.run.trained, self._unread(number)))
        return True

    def begin(self, batch: Any) -> None:
        """A step that nothing but the next one is to follow, whose device does not wait for us."""
        lr = self._set_options()
        try:
            step = self.run.begin(batch)
        except BaseException:
            self._end_last()
            raise
        plan = self.run.trained
        if self.batches:
            self.batches.trained()
        if self.scheduled:
            self.rate.advance()
        self.end_begun()
        self.under_way = step, _Step(lr, plan, self._unread(self.done + 1))

    def _end_last(self) -> None:
        """The step that has begun has its line, if there still is one, whatever comes behind it."""
        with contextlib.suppress(Exception):
            self.end_begun()

    def end_begun(self) -> None:
        """Wait for the step that has begun, if one has, and write its line."""
        if self.under_way is not None:
            (under_way, step), self.under_way = self.under_way, None
            self._took(under_way.result(), step)

    def _set_options(self) -> float:
        """What the schedule says of the coming step; its learning rate."""
        lr = self.rate.lr
        if self.scheduled and self.options != self.rate.options:
            self.options = self.rate.options
            self.run.set_options(self.options)
        return lr

    def _unread(self, number: int) -> tuple[int, int]:
        return self.notices.unread(self.batches.faults, number) if self.batches else (0, 0)

    def _took(self, result: StepResult, step: _Step) -> None:
        """The record of a step, and its line."""
        now = time.perf_counter()
        seconds, self.since = now - self.since - self.notices.compiled(), now
        self.meter.step(seconds)
        retried, skipped = step.unread
        record = Record(
            step=self.done,
            loss=result.loss,
            norm=result.norm,
            lr=step.lr,
            ms=1e3 * seconds,
            per_second=unit_of(step.plan)[1] / seconds,
            mfu=self.meter.mfu(step.plan, seconds),
            memory=self.meter.memory,
            metrics=dict(result.metrics),
            retried=retried,
            skipped=skipped,
            not_trained=self.guard.taken(),
        )
        self.training.records.append(record)
        self.lines.step(record, self.steps, self.meter.eta)
        if record.not_finite and (text := self.guard.not_finite(record)):
            self.lines.warning(record.step, text)
        self.callbacks.tell("on_step", record)

    def evaluate(self, data: Any) -> None:
        """The mean loss and metrics over all batches of other data, in the record of the last step."""
        begun, mean = time.perf_counter(), Mean()
        self.lines.state("evaluating")
        # With a batch left out it is another mean: only what no plan could take is.
        policy = ReadPolicy(self.policy.again, partial="train")
        batches = Batches(self.run, data, name="eval", policy=policy)
        for batch in batches:
            mean.add(self.run.evaluate(batch))
        for rows in batches.faults.partial:
            text = f"the evaluation leaves out a batch of {rows} samples, which does not divide"
            self.lines.warning(self.done, text)
        if not mean.num:
            raise RunError("the data to evaluate has no batch", legal="at least one")
        record = msgspec.structs.replace(
            self.training.records[-1], evaluation=mean.loss, evaluation_metrics=mean.metrics
        )
        self.training.records[-1] = record
        self.notices.compiled()
        now = time.perf_counter()
        self.lines.evaluation(record, mean.num, now - begun)
        self.callbacks.tell("on_evaluation", record)
        self.since = now  # it is no part of the next step

    def end(self) -> Training:
        """Under torchrun ranks have measured times of their own: all get those of rank 0."""
        self.training.seconds = self.seconds
        self.training.position = self.position()
        if self.run.workers.reading == "rank":
            pool: Any = self.run.workers.pool
            self.training = pool.from_first(self.training)
        self.lines.end(self.training)
        self.callbacks.tell("on_end", self.training)
        return self.training


def _prepare_evaluation(run: Run, data: Any) -> None:
    """Before the first step: what cannot be evaluated must not end a training that is done."""
    if callable(data) and run.workers.reading == "members":
        reference(data)
    run.prepare_evaluation()


def _constant(optimizer: Any) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0)
