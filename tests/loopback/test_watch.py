"""`piper.train(watch=...)`: who follows a training sees it, and a training is none the worse for it."""

import json
import re
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.errors import RunError
from piper.observe.timeline_files import load_timeline
from piper.training import watched_steps
from piper.training.records import Training
from piper.view.live.chronicle import Chronicle
from piper.view.live.server import LiveServer
from tests import counted
from tests.live import Listener, ask, threads_left

BATCHES = [{"ids": torch.arange(i, i + 8)} for i in range(0, 32, 8)]


class Follower(piper.Callback):
    """Looks at a training from its first step on."""

    def __init__(self, capsys: pytest.CaptureFixture[str], at: int = 2) -> None:
        self.capsys, self.at = capsys, at
        self.printed = ""
        self.listener: Listener | None = None

    @property
    def url(self) -> str:
        self.printed += self.capsys.readouterr().out
        found = re.search(r"http://[^\s\"]+", self.printed)
        assert found, self.printed
        return found[0]

    def on_step(self, record: Any) -> None:
        if record.step == self.at:
            self.listener = Listener(self.url)
            self.listener.until("curves")

    def rest(self) -> Listener:
        """What was said until the end."""
        assert self.listener is not None
        with self.listener as found:
            while found.message() is not None:
                pass
        return found


def _train(*callbacks: Any, steps: int = 6, **options: Any) -> Training:
    given = {"log": "text", "watch": True, "launch": "loopback", **options}
    return piper.train(counted.job(2, 8), BATCHES * 2, steps=steps, callbacks=callbacks, **given)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    assert threads_left() == []


def test_a_follower_sees_steps_evaluations_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(capsys)
    training = _train(follower, evaluate=BATCHES[:1], evaluate_every=3, log_every=100)
    found = follower.rest()
    assert found.steps == [1, 2, 3, 4, 5, 6]  # also those that have no line
    assert found.states == ["running", "evaluating", "running", "evaluating", "running", "ended"]
    assert found.latest["numbers"]["values"] == {"evaluation loss": training.evaluation}
    facts = found.latest["facts"]
    plan = counted.job(2, 8).plan
    assert facts["title"] == "dp 2" and facts["plan"] == plan.content_hash()
    assert (facts["step"], facts["steps"], facts["ranks"]) == (0, 6, 2)
    assert found.latest["state"]["text"] == training.as_text()
    assert follower.printed.count("watch it at http://127.0.0.1:") == 1
    with pytest.raises(OSError):
        ask(follower.url, "GET", "/")


def test_the_url_is_an_event_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(capsys)
    _train(follower, log="json")
    follower.rest()
    printed = follower.printed + capsys.readouterr().out
    events = [json.loads(line) for line in printed.splitlines()]
    assert events[0] == {"event": "watch", "url": follower.url}
    assert {event["event"] for event in events} == {"watch", "note", "step", "end"}


def test_recorded_steps_can_be_looked_into(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(capsys, at=6)
    blocks: list[Any] = []

    class Looks(piper.Callback):
        def on_step(self, record: Any) -> None:
            if record.step == 6:
                path = f"/{follower.url.rsplit('/', 2)[1]}/step"
                blocks.append(zlib.decompress(ask(follower.url, "GET", path).body))

    _train(follower, Looks(), steps=7, watch_every=3)
    recorded = [facts["step"] for facts in [follower.rest().latest["recorded"]]]
    assert recorded == [6]  # the third, and every third after it
    (block,) = blocks
    head = json.loads(block[4 : 4 + int.from_bytes(block[:4], "little")])
    assert head["timelines"][0]["name"] == "step 6" and head["timelines"][0]["path"]
    assert len(head["timelines"][0]["tracks"]) == 2


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, []), (9, [3])])
def test_watch_every_says_which_steps_are_recorded(
    monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(
        Chronicle, "set", lambda self, name, facts: recorded.append(facts.get("step", 0))
    )
    _train(steps=4, watch_every=every)
    assert [step for step in recorded if step] == expected


def test_by_itself_recording_costs_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: a step takes 0.1 s, and 0.3 s if it is recorded."""

    class Run:
        is_recording = False

        def record(self, steps: int) -> Any:
            self.asked = True
            return type("Recording", (), {"timeline": "measured"})

        def agreed(self, act: Any) -> int:
            return int(act())

    run, now = Run(), [0.0]
    monkeypatch.setattr(watched_steps.time, "perf_counter", lambda: now[0])
    found = watched_steps.WatchedSteps(None)
    found.begin(run, 0, None)  # type: ignore[arg-type]
    recorded = []
    for number in range(1, 1001):
        run.asked = False
        found.before_step(number)
        now[0] += 0.3 if run.asked else 0.1
        if found.after_step(number):
            recorded.append(number)
    assert recorded == [3, 203, 403, 603, 803]  # 0.2 s in 20 s
    found.begin(run, 1000, 1001)  # type: ignore[arg-type]
    assert found.due == 1001  # of a training that is short


def test_steps_that_are_recorded_into_a_file_are_not_recorded_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.timeline"
    _train(steps=8, record=path, record_steps="2:5", watch_every=1)
    assert len(load_timeline(path).steps) == 3


def test_nothing_of_a_training_changes(capsys: pytest.CaptureFixture[str]) -> None:
    plain = _train(watch=False)
    follower = Follower(capsys)
    assert _train(follower, watch_every=1).losses == plain.losses
    follower.rest()


def test_an_error_of_training_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Raises(piper.Callback):
        def on_step(self, record: Any) -> None:
            if record.step == 4:
                raise ValueError("no more")

    follower = Follower(capsys)
    with pytest.raises(RunError, match="no more") as caught:
        _train(follower, Raises())
    state = follower.rest().latest["state"]
    assert state["name"] == "failed" and state["text"] == str(caught.value)


def test_an_interrupt_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupts(piper.Callback):
        def on_step(self, record: Any) -> None:
            if record.step == 4:
                raise KeyboardInterrupt

    follower = Follower(capsys)
    with pytest.raises(KeyboardInterrupt):
        _train(follower, Interrupts())
    assert follower.rest().states == ["running", "interrupted"]


@pytest.mark.parametrize("where", ["numbers", "begin", "set"])
def test_what_fails_in_the_live_view_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(Chronicle, where, fails)
    assert len(_train().losses) == 6
    printed = capsys.readouterr().out
    assert printed.count("the live view is closed: ZeroDivisionError: a fault of ours") == 1
    assert printed.count("warning") == 1 and "step 6/6" in printed


def test_what_fails_in_its_threads_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(self: LiveServer, token: str) -> bool:
        raise ZeroDivisionError("a fault of ours")

    class Asks(piper.Callback):
        def on_step(self, record: Any) -> None:
            if record.step == 2:
                printed.append(capfd.readouterr().out)
                url = re.findall(r"http://\S+", printed[0])[0]
                with pytest.raises(OSError):
                    ask(url, "GET", "/")

    printed: list[str] = []
    monkeypatch.setattr(LiveServer, "knows", fails)
    assert len(_train(Asks()).losses) == 6
    out, errors = capfd.readouterr()
    assert out.count("the live view is closed: ZeroDivisionError") == 1 and errors == ""


def test_a_page_that_is_left_open_ends_with_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A browser that has heard the end goes by itself; one that stays is cut off."""
    follower = Follower(capsys)
    begun = time.monotonic()
    _train(follower)
    assert time.monotonic() - begun < 30
    assert threads_left() == []
    listener = follower.rest()
    assert "over" in listener.latest


def test_under_a_thread_of_the_users_it_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(capsys)
    thread = threading.Thread(target=lambda: _train(follower))
    thread.start()
    thread.join()
    assert follower.rest().states[-1] == "ended"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watch": "8080"}, "'8080' is no address to serve at"),
        ({"watch": 8080}, "watch=8080"),
        ({"watch": False, "watch_every": 3}, "watch_every=3 without watch"),
        ({"watch_every": -1}, "watch_every=-1"),
        ({"log": "none"}, "nobody would learn the address"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message) as caught:
        _train(**options)
    assert caught.value.legal


def test_an_address_for_others_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    _train(watch="0.0.0.0:0")
    printed = capsys.readouterr().out
    assert printed.count("the live view is served at 0.0.0.0, not encrypted") == 1


def test_a_training_that_goes_on_shows_what_was_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    _train(steps=3, checkpoint=folder)
    capsys.readouterr()
    follower = Follower(capsys, at=5)
    _train(follower, steps=6, checkpoint=folder, resume=True)
    found = follower.rest()
    assert found.steps == [1, 2, 3, 4, 5, 6] and found.latest["facts"]["step"] == 3
    assert "saving" in found.states and found.latest["note"]["kind"] == "checkpoint"
