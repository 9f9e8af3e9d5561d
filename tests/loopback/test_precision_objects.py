"""Every precision, by name and as an object, beside the same roundings in plain torch on one device."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import piper
from piper import Precision
from piper.api.job import Job
from piper.api.program import Program
from piper.errors import PlanError
from piper.ir.precisions import PRECISIONS, Dtypes
from piper.plan.local_order import Local
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.optimizers import KNOWN, state_pieces
from piper.plan.tasks import Update
from piper.plan.types import ParamGroup, plan_from_json
from piper.runtime.worker.storages import optimizer_tensors
from piper.runtime.worker.update import Piece, Updater
from piper.runtime.worker.weights import initial_value
from piper.strategies import parallel
from tests.float32_mode import Float32Mode
from tests.loopback.storages import live, unique_bytes
from tests.zoo import ADAMW, CASES, batches_of, program_of

STEPS = 6
LR = 1e-2
MIXED = {
    **{name: PRECISIONS[name] for name in ("bf16-wire", "bf16-pure")},
    "narrow sums": Precision(compute="bfloat16", masters="float32", sums="bfloat16"),
    "wide wire": Precision(compute="bfloat16", sums="bfloat16", wire="float32"),
    "narrow state": Precision(compute="bfloat16", state="bfloat16"),
    "no masters": Precision(compute="bfloat16", masters="bfloat16", state="float32"),
}
PLANS: dict[str, dict[str, Any]] = {
    **{f"dp2 zero{zero}": {"dp": 2, "zero": zero} for zero in range(4)},
    **{f"pp2 dp2 zero{zero}": {"pp": 2, "dp": 2, "zero": zero} for zero in range(2)},
    "dp2 zero3 each": {"dp": 2, "zero": 3, "reduce_every": 1},
    "pp2 dp2 zero2 each": {"pp": 2, "dp": 2, "zero": 2, "reduce_every": 1},
    "pp2 dp2 zero3 zb": {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb_h1"},
}


@cache
def _program() -> Program:
    """In float32."""
    case = CASES["dense"]
    return piper.trace(case.make_model, case.batch(0), case.step)


def _job(precision: Any, plan: str = "dp2 zero0", **options: Any) -> Job:
    strategy = parallel(microbatches=2, **PLANS[plan])
    options = {"optimizer": piper.adamw(lr=LR), **options}
    return _program().apply(strategy).lower(precision=precision, **options)


def _batches() -> list[Any]:
    return [CASES["dense"].batch(seed % 3) for seed in range(STEPS)]


class _Step(nn.Module):
    def __init__(self, model: nn.Module, step: Any) -> None:
        super().__init__()
        self.model = model
        self.step = step

    def forward(self, rows: Any) -> Any:
        return self.step(self.model, rows)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


class _Reference:
    """Plain torch on one device, with each rounding where the plan has it.

    Gradients of a rank's microbatches are summed in `sums`; that is cast to `wire`, added over ranks
    there, and cast back; or each microbatch goes over the wire by itself. AdamW steps masters; its
    averages are cast to `state` after each step.
    """

    def __init__(self, job: Job, *, each_microbatch: bool) -> None:
        self.job, self.each_microbatch = job, each_microbatch
        precision = job.plan.precision
        self.compute = _dtype(precision.compute or "float32")
        chosen = precision.dtypes(precision.compute or "float32")
        self.master, self.sums, self.wire, self.state = map(_dtype, chosen)
        plan = job.plan
        initial = {n: initial_value(t, job.bodies, seed=plan.seed) for n, t in plan.tensors.items()}
        self.model = job.source.make_model().requires_grad_(False)
        names = [name for name, _ in self.model.named_parameters()]
        self.masters = {n: nn.Parameter(initial[n].to(self.master)) for n in names}
        self.buffers = {n: initial[n] for n, _ in self.model.named_buffers()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=LR)

    def step(self, batch: dict[str, Tensor]) -> float:
        ranks, num = self.job.plan.num_data_ranks, self.job.plan.num_microbatches
        grads: dict[tuple[int, int], list[Tensor]] = {}
        losses: dict[tuple[int, int], Tensor] = {}
        for rank in range(ranks):
            for micro in range(num):
                rows = {k: v.chunk(ranks * num)[rank * num + micro] for k, v in batch.items()}
                losses[rank, micro], grads[rank, micro] = self._gradients(rows)
        for place, master in enumerate(self.masters.values()):
            parts = {key: found[place] for key, found in grads.items()}
            master.grad = (self._reduced(parts, ranks, num) / (ranks * num)).to(self.master)
        self._take()
        per_rank = [sum(losses[r, m] for m in range(num)) for r in range(ranks)]
        return float(sum(per_rank)) / (ranks * num)

    def _gradients(self, rows: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        params = {n: m.detach().to(self.compute).requires_grad_() for n, m in self.masters.items()}
        tensors = {f"model.{n}": t for n, t in (params | self.buffers).items()}
        mode = Float32Mode() if self.job.plan.precision.widens else contextlib.nullcontext()
        with torch.enable_grad(), mode:
            loss = functional_call(_Step(self.model, self.job.source.step), tensors, (rows,))
        return loss.detach().float(), list(torch.autograd.grad(loss, list(params.values())))

    def _reduced(self, parts: dict[tuple[int, int], Tensor], ranks: int, num: int) -> Tensor:
        if self.each_microbatch:
            sent = [[parts[r, m].to(self.sums) for r in range(ranks)] for m in range(num)]
        else:
            sent = [[self._added([parts[r, m] for m in range(num)]) for r in range(ranks)]]
        received = []
        for each in sent:
            total = each[0].to(self.wire)
            for more in each[1:]:
                total = total + more.to(self.wire)
            received.append(total)
        return self._added(received)

    def _added(self, terms: list[Tensor]) -> Tensor:
        total = terms[0].to(self.sums, copy=True)
        for more in terms[1:]:
            total += more
        return total

    def _take(self) -> None:
        for kept in self.optimizer.state.values():
            self._cast(kept, self.master)
        self.optimizer.step()
        for kept in self.optimizer.state.values():
            self._cast(kept, self.state)

    def _cast(self, kept: dict[str, Tensor], dtype: torch.dtype) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            kept[name] = kept[name].to(dtype)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MIXED)
def test_training_has_the_roundings_of_one_device(name: str, plan: str) -> None:
    """In every bit: two ranks are added in one order only. Under the adversary, too."""
    job = _job(MIXED[name], plan)
    reference = _Reference(job, each_microbatch="reduce_every" in PLANS[plan])
    losses = [reference.step(batch) for batch in _batches()]
    assert losses[-1] < losses[0]
    for options in ({}, {"adversary": True, "seed": 5}):
        with job.launch("loopback", **options) as run:
            assert [run.step(batch).loss for batch in _batches()] == losses
            masters, params, state = run.masters(), run.parameters(), run.optimizer_state()
            grads = run.gradients()
            assert run.differing_replicas() == []
        for key, wanted in reference.masters.items():
            assert masters[key].dtype == reference.master and torch.equal(masters[key], wanted), key
            assert torch.equal(params[key], wanted.bfloat16()), key
            assert grads[key].dtype == reference.sums
            kept = reference.optimizer.state[wanted]
            for piece in ("exp_avg", "exp_avg_sq"):
                assert state[key][piece].dtype == reference.state
                assert torch.equal(state[key][piece], kept[piece]), (key, piece)
            assert state[key]["step"].dtype == torch.float32 and state[key]["step"] == STEPS


@pytest.mark.parametrize(
    ("one", "other"),
    [("bf16-wire", "bf16"), ("narrow sums", "wide wire"), ("narrow sums", "bf16"),
     ("narrow state", "bf16"), ("no masters", "bf16"), ("bf16-pure", "no masters")],
)  # fmt: skip
def test_each_dtype_makes_a_difference(one: str, other: str) -> None:
    """So that one that was ignored would not pass the test above."""
    found = []
    for precision in (MIXED.get(one, one), MIXED.get(other, other)):
        with _job(precision, "dp2 zero3 each").launch("loopback") as run:
            for batch in _batches():
                run.step(batch)
            found.append(run.masters())
    assert any(not torch.equal(found[0][key], found[1][key]) for key in found[0])


# Bounds in float64, where all else is exact to 1e-15

EXACT = {
    **PLANS,
    "pp2 dp2 ep2 zero1": {"pp": 2, "dp": 2, "ep": 2, "zero": 1},
    "dp4 ep2 zero2": {"dp": 4, "ep": 2, "zero": 2},
}


def _exact_job(plan: str, **precision: Any) -> Job:
    strategy = parallel(microbatches=2, **EXACT[plan])
    chosen = Precision(**precision)
    return program_of("tied").apply(strategy).lower(optimizer=ADAMW, precision=chosen)


def _exact_gradients(job: Job) -> dict[str, Tensor]:
    with job.launch("loopback", adversary=True, seed=2) as run:
        run.step(batches_of("tied")[0])
        return run.gradients()


def _largest_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Per parameter, relative to its largest element."""
    return {
        key: float((found[key].double() - wanted[key]).abs().max() / wanted[key].abs().max())
        for key in wanted
    }


@pytest.mark.parametrize("plan", EXACT)
def test_a_float32_wire_loses_the_bits_of_float32(plan: str) -> None:
    """A wire that was ignored would lose nothing; float32's unit is 6e-8, of a few roundings."""
    job = _exact_job(plan, wire="float32")
    wanted = _exact_gradients(_exact_job(plan))
    found = _exact_gradients(job)
    errors = _largest_errors(found, wanted)
    assert {grad.dtype for grad in found.values()} == {torch.float64}
    num_reduced = 0
    for bucket in job.plan.buckets:
        reduced = bucket.over or bucket.copies or len(bucket.slices) > 1
        for name in bucket.params:
            assert not reduced or 2**-30 < errors[name] < 8 * 2**-24, name
            assert reduced or errors[name] == 0, f"{name} has no copies, but was cast"
            num_reduced += bool(reduced)
    assert num_reduced >= 4


@pytest.mark.parametrize("plan", ["dp2 zero0", "dp2 zero3", "pp2 dp2 zero1"])
def test_float32_sums_of_a_float64_model(plan: str) -> None:
    """The wire is as wide as sums are; masters stay float64, and so does the step."""
    wanted = _exact_gradients(_exact_job(plan))
    found = _exact_gradients(_exact_job(plan, sums="float32"))
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    for name, error in _largest_errors(found, wanted).items():
        assert 2**-30 < error < 8 * 2**-24, name


def test_a_wire_without_peers_is_not_there() -> None:
    """One data rank reduces nothing: no cast, and the same plan but for its precision."""
    jobs = [
        program_of("dense").lower(optimizer=ADAMW, precision=precision)
        for precision in (None, Precision(wire="bfloat16"))
    ]
    assert jobs[0].plan.classes == jobs[1].plan.classes
    assert jobs[0].plan.buckets != jobs[1].plan.buckets


# Memory


def _bytes_of(job: Job) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Per rank, bytes of unique live storages after a step; and what the rank says of them."""
    with job.launch("loopback") as run:
        run.step(CASES["dense"].batch(0))
        found = []
        for worker in run.workers.workers:  # type: ignore[attr-defined]
            kept = live(worker, lambda s: s.kind in ("param", "flat", "shard"))
            mine = {t.untyped_storage().data_ptr() for t in kept}
            buckets = range(len(worker.plan.buckets))
            state = optimizer_tensors(worker, set(buckets))
            others = [t for t in state if t.untyped_storage().data_ptr() not in mine]
            grads = live(worker, lambda s: s.kind == "grad")
            found.append(
                {
                    "parameters": unique_bytes(kept),
                    "gradients": unique_bytes(grads),
                    "optimizer": unique_bytes(others),
                }
            )
        return found, run.memory()


SIZES = {  # bytes a parameter: itself, its gradient, masters and two averages
    "bf16": (2, 4, 4 + 8),
    "bf16-wire": (2, 4, 4 + 8),
    "bf16-pure": (2, 2, 4),
    "narrow sums": (2, 2, 4 + 8),
    "narrow state": (2, 4, 4 + 4),
    "no masters": (2, 4, 8),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("plan", ["dp2 zero0", "dp2 zero1", "dp2 zero3"])
def test_memory_is_what_the_dtypes_take(name: str, plan: str) -> None:
    """What is planned is what ranks really hold, and as large as their elements."""
    job = _job(MIXED.get(name, name), plan)
    zero = PLANS[plan]["zero"]
    num = sum(bucket.size for bucket in job.plan.buckets)
    shares = (num / (2 if zero == 3 else 1), num / (2 if zero else 1), num / (2 if zero else 1))
    (peak,) = job.report.peaks
    for found, said in zip(*_bytes_of(job), strict=True):
        for what, share, size in zip(found, shares, SIZES[name], strict=True):
            assert found[what] == pytest.approx(share * size, rel=0.03), what
            assert said[what] == pytest.approx(peak.kept[what], rel=0.03), what
            assert found[what] <= said[what]  # with what the wire brings


def test_without_masters_there_are_none() -> None:
    with _job("bf16-pure").launch("loopback") as run:
        run.step(CASES["dense"].batch(0))
        for worker in run.workers.workers:  # type: ignore[attr-defined]
            for updater in worker.updaters.values():
                assert updater.narrow == []
                assert {master.dtype for master in updater.masters} == {torch.bfloat16}


def test_a_step_has_wide_state_of_one_bucket_at_a_time() -> None:
    """In the plan, and really; gradients of other dtypes than masters are cast alike."""
    strategy = parallel(dp=2, microbatches=2, zero=1, bucket_size=600)
    precision = Precision(compute="bfloat16", sums="bfloat16", state="bfloat16")
    job = _program().apply(strategy).lower(optimizer=piper.adamw(lr=LR), precision=precision)
    (part,) = job.plan.classes
    ledger = MemoryLedger(job.plan, Local(part.tasks, part.slots))
    kept, num_updates = ledger.held["optimizer"], 0
    for index, task in enumerate(part.tasks):
        ledger.start(index)
        wide = ledger.held["optimizer"] - kept
        ledger.end(index)
        if isinstance(task, Update):  # two averages, a number and the gradient
            assert wide == 4 * 3 * job.plan.buckets[task.bucket].size // 2 + 4
            num_updates += 1
        else:
            assert wide == 0
    assert num_updates > 2
    with job.launch("loopback") as run:
        seen: list[list[set[torch.dtype]]] = []
        run.step(CASES["dense"].batch(0))
        updaters = run.workers.workers[0].updaters  # type: ignore[attr-defined]

        def look() -> None:
            seen.append([_state_dtypes(updater) for updater in updaters.values()])

        for updater in updaters.values():
            updater._steps.append(look)
        run.step(CASES["dense"].batch(0))
    assert len(seen) == num_updates
    for found in seen:
        assert sorted(map(str, found)).count("{torch.bfloat16}") == num_updates - 1
        assert found.count({torch.float32}) == 1


def _state_dtypes(updater: Updater) -> set[torch.dtype]:
    states = [kept for o in updater.optimizers.values() for kept in o.state.values()]
    return {kept[piece].dtype for kept in states for piece in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("optimizer", [name for name in KNOWN if hasattr(torch.optim, name)])
def test_every_optimizer_keeps_its_state_so(optimizer: str) -> None:
    """Elements in bfloat16, numbers as torch has them; a step goes on from the rounded ones."""
    options: dict[str, Any] = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
    group = ParamGroup(optimizer, options)
    start = torch.linspace(-1, 1, 24).view(4, 6)
    params, pieces = [start.clone(), start.clone()], [Piece(0, 0, 0, 24)]
    plain = Updater([group], params[:1], [None], pieces, state=torch.float32)
    narrow = Updater([group], params[1:], [None], pieces, state=torch.bfloat16)
    names = dict(state_pieces(group, (4, 6)))
    for step in range(3):
        grad = torch.sin(torch.arange(24.0) * (step + 1)).view(4, 6)
        with torch.no_grad():
            for updater in (plain, narrow):
                updater.step(updater.grads_of([grad.clone()]), 1.0)
        (wide,), (kept,) = (list(*_states(updater)) for updater in (plain, narrow))
        assert wide.keys() == kept.keys() == names.keys()
        for name, form in names.items():
            number = form == "number"
            assert kept[name].dtype == (wide[name].dtype if number else torch.bfloat16), name
            wide[name] = wide[name] if number else wide[name].bfloat16().float()
            assert torch.equal(kept[name].to(wide[name].dtype), wide[name]), name
    assert torch.equal(*params), "the same as rounding torch's own state between steps"


def _states(updater: Updater) -> list[Any]:
    return [optimizer.state.values() for optimizer in updater.optimizers.values()]


# Clipping, averages, checkpoints


@pytest.mark.parametrize("name", ["bf16-wire", "bf16-pure", "narrow state", "narrow sums"])
@pytest.mark.parametrize("plan", ["dp2 zero0", "pp2 dp2 zero2 each"])
def test_a_late_clip_is_a_clip(name: str, plan: str) -> None:
    """Clipped hard, so that all updates are made again from what was kept."""
    found = []
    for late in (False, True):
        job = _job(MIXED[name], plan, clip=0.01, late_clip=late)
        with job.launch("loopback") as run:
            results = [run.step(batch) for batch in _batches()]
            assert results[0].norm is not None and results[0].norm > 0.05
            norm = torch.stack([g.float().norm() for g in run.gradients().values()]).norm()
            assert norm == pytest.approx(0.01, rel=0.02)
            found.append((run.masters(), run.optimizer_state()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bf16-pure", "narrow state"])
def test_moving_averages_are_as_masters_are(name: str) -> None:
    job = _job(MIXED[name], "dp2 zero1", ema=0.5)
    with job.launch("loopback") as run:
        kept: dict[str, Tensor] = {}
        for batch in _batches():
            run.step(batch)
            masters = run.masters()
            kept = {k: torch.lerp(kept.get(k, m), m, 0.5) for k, m in masters.items()}
        averages = run.ema()
    for key, master in masters.items():
        assert averages[key].dtype == master.dtype
        assert torch.equal(averages[key], kept[key]), key


SAVED = ["bf16", "bf16-pure", "narrow state"]


@pytest.mark.parametrize("before", SAVED)
@pytest.mark.parametrize("after", SAVED)
def test_a_run_goes_on_in_another_precision(tmp_path: Path, before: str, after: str) -> None:
    """Values are cast once, when they are read; in the same precision nothing is lost."""
    batches = _batches()
    with _job(MIXED.get(before, before), "dp2 zero1", ema=0.5).launch("loopback") as run:
        for batch in batches[:2]:
            run.step(batch)
        run.save(tmp_path / "saved")
        masters, state, averages = run.masters(), run.optimizer_state(), run.ema()
        losses = [run.step(batch).loss for batch in batches[2:]]
    job = _job(MIXED.get(after, after), "dp2 zero0", ema=0.5)
    wanted = Dtypes(*job.plan.buckets[0].dtypes)
    with job.resume(tmp_path / "saved", "loopback") as run:
        for key, master in run.masters().items():
            assert torch.equal(master, masters[key].to(_dtype(wanted.master))), key
            assert torch.equal(run.ema()[key], averages[key].to(_dtype(wanted.master))), key
        for key, pieces in run.optimizer_state().items():
            assert torch.equal(pieces["step"], state[key]["step"])
            for piece in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(pieces[piece], state[key][piece].to(_dtype(wanted.state)))
        found = [run.step(batch).loss for batch in batches[2:]]
    if before == after:
        assert found == losses
    assert found == pytest.approx(losses, abs=0.05)


def test_weights_are_written_as_masters_are(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name, dtype in (("bf16-pure", torch.bfloat16), ("bf16-wire", torch.float32)):
        with _job(name, "dp2 zero1").launch("loopback") as run:
            folder = run.save_weights(tmp_path / name)
            masters = run.masters()
        written = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {dtype}
        assert all(torch.equal(written[key], master) for key, master in masters.items())


# Parameter groups

GROUPED = piper.adamw(lr=LR, groups={"*.bias": {"weight_decay": 0.0}})


@pytest.mark.parametrize("plan", ["dp2 zero0", "dp2 zero3", "pp2 dp2 zero1"])
@pytest.mark.parametrize("key", ["*.bias", "0"])
def test_groups_have_dtypes_of_their_own(plan: str, key: str) -> None:
    """By label, or by number; a bucket has parameters of one way only."""
    own = {"wire": "bfloat16", "state": "bfloat16"}
    precision = Precision(compute="bfloat16", groups={key: own})
    job = _job(precision, plan, optimizer=GROUPED)
    plain = _job(Precision(compute="bfloat16"), plan, optimizer=GROUPED)
    groups = job.plan.param_groups
    number = next(i for i, group in enumerate(groups) if key in group.names(i))
    chosen = set()
    for bucket in job.plan.buckets:
        mine = {bucket.group_of(place) == number for place in range(len(bucket.params))}
        assert len(mine) == 1, "parameters of two precisions share a bucket"
        assert (bucket.wire == bucket.state == "bfloat16") == mine.pop()
        chosen |= set(bucket.params) if bucket.wire == "bfloat16" else set()
    assert chosen and len(chosen) < len(job.plan.tensors)
    grads = []
    for each in (job, plain):
        with each.launch("loopback") as run:
            run.step(CASES["dense"].batch(0))
            grads.append(run.gradients())
            state = run.optimizer_state()
            for name, pieces in state.items() if each is job else ():
                narrow = pieces["exp_avg"].dtype == torch.bfloat16
                assert narrow == (name in chosen), name
    for name in grads[0]:
        same = torch.equal(grads[0][name], grads[1][name])
        assert same or name in chosen, f"{name} went over the narrow wire"
    assert any(not torch.equal(grads[0][name], grads[1][name]) for name in chosen)


# What is refused, and what is said


def test_unknown_names_dtypes_and_groups() -> None:
    cases: list[tuple[Any, str, str]] = [
        ("bf16-pur", "did you mean 'bf16-pure'", "bf16-wire"),
        (16, "precision=16", "fp32"),
        (Precision(wire="bfloat"), "wire='bfloat' is no dtype", "bfloat16"),
        (Precision(compute="int8"), "compute='int8' is no dtype", "float32"),
        (Precision(groups={"0": {"wires": "float32"}}), "did you mean 'wire'", ""),
        (Precision(groups={"0": {"compute": "float32"}}), "not one of masters, sums, wire", ""),
        (Precision(groups={"head": {}}), "no parameter group is called 'head'", "0"),
        (Precision(groups={"1": {"sums": "float32"}}), "no parameter group is called '1'", "0"),
        (Precision(masters="bfloat16"), "is float32, and has masters of bfloat16", "float32"),
        (Precision(compute="bfloat16", masters="float16"), "no wider", "bfloat16"),
    ]
    for precision, message, legal in cases:
        with pytest.raises(PlanError) as refused:
            _job(precision)
        assert message in refused.value.message, precision
        assert legal in str(refused.value.legal), precision


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_name_is_an_object(name: str) -> None:
    by_name, by_object = _job(name).plan, _job(PRECISIONS[name]).plan
    assert by_name == by_object and by_name.content_hash() == by_object.content_hash()
    assert plan_from_json(by_name.to_json()) == by_name
    shown = "as written" if name == "fp32" else name
    assert str(by_name.precision) == shown
    job = _job(name)
    assert f"precision {shown}\n" in job.summary()
    with job.launch("loopback") as run:
        assert repr(run).endswith("on cpu>" if name == "fp32" else f"on cpu, precision {name}>")
    changes = _job(None).diff(job)
    assert changes == "" if name == "fp32" else f"precision: as written -> {name}" in changes


def test_a_precision_says_what_it_has() -> None:
    own = Precision(compute="bfloat16", wire="float32", groups={"0": {"state": "bfloat16"}})
    assert str(own) == "compute bfloat16, wire float32, group 0: state bfloat16"
    job = _job(own)
    assert plan_from_json(job.plan.to_json()).precision == own
    assert f"precision {own}" in job.summary()
    assert _program().expected(precision=own).steps
    assert PRECISIONS["bf16"].float32_operators and not PRECISIONS["bf16-pure"].float32_operators
