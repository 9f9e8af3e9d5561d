"""The live view's server: who may ask, what is told to whom, and what is left of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from piper.cost.presets import machine
from piper.errors import RunError
from piper.sim.simulate import simulate
from piper.view.live import requests, step_reports
from piper.view.live.address import DEFAULT, address_of, may_ask
from piper.view.live.chronicle import RECENT, Chronicle
from piper.view.live.curve import Curve
from piper.view.live.server import LAST_WORDS, MOST_CLIENTS, LiveServer
from piper.view.live.step_reports import StepReports

from ..live import Listener, ask, threads_left
from ..plans import plan_of


@pytest.fixture
def server() -> Iterator[LiveServer]:
    found = LiveServer(address_of(DEFAULT), Chronicle(), StepReports("a strategy"))
    yield found
    found.close()
    assert threads_left() == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.1:1", "LOCALHOST:9", "127.9.9.9"]
)
def test_this_machine_may_be_asked_for(host: str) -> None:
    assert may_ask(host, address_of(DEFAULT))


@pytest.mark.parametrize(
    "host",
    ["", "evil.com", "evil.com:80", "localhost.evil.com", "127.0.0.1.evil.com", "10.0.0.1", "[::2]",
     "127.0.0.1 evil.com", "user@127.0.0.1", socket.gethostname()],
)  # fmt: skip
def test_another_name_may_not(host: str) -> None:
    """A page elsewhere can have its name point to 127.0.0.1, but not choose what a browser calls it."""
    assert not may_ask(host, address_of(DEFAULT))


def test_an_open_address_has_the_machines_numbers_and_name_but_no_others() -> None:
    address = address_of("0.0.0.0:0")
    assert not address.is_loopback
    assert all(
        may_ask(host, address) for host in ("10.0.0.1:80", "[fe80::1]", socket.gethostname())
    )
    assert not may_ask("evil.com", address)


@pytest.mark.parametrize(
    "text",
    ["", "8080", "127.0.0.1", "127.0.0.1:70000", "127.0.0.1:-1", "a b:80", "nowhere.invalid:80"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RunError, match="is no address to serve at") as caught:
        address_of(text)
    assert caught.value.legal and "127.0.0.1:8080" in caught.value.legal


def test_a_taken_port_is_said_before_anything_is_launched(server: LiveServer) -> None:
    port = urlsplit(server.url).port
    with pytest.raises(
        RunError, match=f"cannot be served at 127.0.0.1:{port}: Address already in use"
    ):
        LiveServer(address_of(f"127.0.0.1:{port}"), Chronicle(), StepReports())


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("rest", ["", "events", "step", "nothing"])
def test_without_the_token_or_for_another_host_nothing_is_served(
    server: LiveServer, method: str, rest: str
) -> None:
    token = server.token
    for path in (
        "/",
        f"/{rest}",
        f"/{token[:-1]}/{rest}",
        f"/{token}x/{rest}",
        f"/./{token}/{rest}",
    ):
        if path != f"/{token}/":
            assert ask(server.url, method, path).status == 403, path
    right = f"/{token}/{rest}"
    for hosts in (["evil.com"], [], ["127.0.0.1", "evil.com"]):
        assert ask(server.url, method, right, hosts=hosts).status == 403, hosts
    if method != "GET":
        assert ask(server.url, method, right).status == 405
    elif rest != "events":
        assert ask(server.url, method, right).status == {"": 200, "step": 204}.get(rest, 404)


def test_the_page_may_run_its_script_and_ask_its_server_and_no_other(server: LiveServer) -> None:
    found = ask(server.url, "GET", f"/{server.token}/")
    policy = found.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy and "unsafe-eval" not in policy
    assert found.headers["Referrer-Policy"] == "no-referrer"
    assert found.headers["Cache-Control"] == "no-store"
    assert not any(name.lower().startswith("access-control") for name in found.headers)
    assert server.token.encode() not in found.body


def test_a_listener_hears_what_was_and_what_comes_and_the_end(server: LiveServer) -> None:
    chronicle = server.chronicle
    chronicle.begin(0, {"title": "a strategy"})
    chronicle.numbers(1, {"loss": 2.0, "norm": float("nan")}, eta=3.0)
    with Listener(server.url) as listener:
        first = listener.until("facts")
        assert first["curves"] == {"loss": [[1, 2.0]], "norm": [[1, None]]}
        chronicle.numbers(2, {"loss": 1.0, "norm": 0.5}, eta=2.0)
        assert listener.until("numbers")["numbers"]["values"] == {"loss": 1.0, "norm": 0.5}
        chronicle.set("state", {"name": "ended"})
        server.close()
        assert listener.until("over")["state"] == {"name": "ended"}
        assert listener.is_over
    with pytest.raises(OSError):
        ask(server.url, "GET", "/")


def test_who_is_far_behind_gets_the_whole_again() -> None:
    chronicle = Chronicle()
    _, moment, _ = chronicle.since(-1, within=0)
    for step in range(RECENT + 5):
        chronicle.numbers(step, {"loss": float(step)})
    events, _, _ = chronicle.since(moment, within=0)
    assert [name for name, _ in events] == ["curves"] and len(events[0][1]["loss"]) < RECENT
    events, moment, _ = chronicle.since(moment + RECENT, within=0)
    assert [facts["step"] for _, facts in events] == list(range(RECENT, RECENT + 5))
    chronicle.begin(10, {})
    events, _, _ = chronicle.since(moment, within=0)  # a run that began again: later steps are void
    assert events[0][1]["loss"][-1][0] <= 10


def test_a_long_curve_is_thinned_by_means() -> None:
    curve = Curve(most=8)
    for step in range(1, 101):
        curve.add(step, float(step))
    assert len(curve.points) < 8 and curve.width == 16
    assert curve.points[0] == (16, 8.5) and curve.points[-1] == (100, 98.5)
    curve.cut(40)
    assert curve.points[-1][0] == 32


def test_numbers_that_are_none_make_no_mean() -> None:
    curve = Curve(most=2)
    for step, value in enumerate([float("nan"), 3.0, None, float("inf")]):
        curve.add(step, value)
    assert curve.points == [(3, 3.0)] or curve.points == [(1, 3.0), (3, None)]


def test_a_client_that_never_reads_costs_nothing_and_is_dropped(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others hear everything meanwhile, and nobody waits for it: neither who writes nor the end."""
    monkeypatch.setattr(requests, "PAUSE", 0.01)
    parts = urlsplit(server.url)
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect((parts.hostname, parts.port))
    stuck.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    with Listener(server.url) as listener:
        listener.until("curves")
        slowest = 0.0
        for step in range(400):  # 40 MB, more than any buffer between the two
            begun = time.perf_counter()
            server.chronicle.note({"kind": "note", "text": "x" * 100_000, "at": step})
            slowest = max(slowest, time.perf_counter() - begun)
            time.sleep(0.001)
        server.chronicle.numbers(1, {"loss": 1.0})
        assert listener.until("numbers")["numbers"]["step"] == 1
        assert slowest < 0.5  # it would be PATIENCE, and for ever
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < LAST_WORDS + 2 < requests.PATIENCE
    stuck.close()
    assert threads_left() == []


def test_too_many_clients_are_turned_away_and_do_not_stop_others(server: LiveServer) -> None:
    parts = urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_CLIENTS + 4):
            stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
        for _ in range(100):
            if sum(name == "piper-watch" for name in threads_left()) > MOST_CLIENTS:
                break
            time.sleep(0.02)
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(server.url, "GET", f"/{server.token}/")
    for _ in range(100):  # as soon as they have gone
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(server.url, "GET", f"/{server.token}/").status == 200:
                return
        time.sleep(0.05)
    raise AssertionError("nobody is served any more")


def test_a_recorded_step_is_made_into_a_report_when_asked_for() -> None:
    plan = plan_of("pp_dp_ep")
    reports = StepReports("a strategy")
    timeline = simulate(plan, machine("h100"), steps=1, by_rank=True)
    timeline.plan_json = plan.to_json()
    assert reports.latest() is None
    assert reports.put(timeline, "step 7") == 1
    found = reports.latest()
    assert found is not None and found[0] == 1
    again = reports.latest()
    assert again is not None and again[1] is found[1]  # it is made once
    block = zlib.decompress(found[1])
    head = json.loads(block[4 : 4 + int.from_bytes(block[:4], "little")])
    assert head["title"] == "a strategy" and head["timelines"][0]["name"] == "step 7"
    assert head["timelines"][0]["path"] and head["plan"]["hash"] == plan.content_hash()
    reports.put(timeline, "step 9")
    later = reports.latest()
    assert later is not None and later[0] == 2 and later[1] != found[1]
    reports.put(timeline, "step 11")
    reports.close()
    assert reports.latest() is None


def test_a_report_on_its_way_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reports, "PROGRAM", "http.server")  # which never ends by itself
    server = LiveServer(address_of(DEFAULT), Chronicle(), StepReports())
    server.reports.put(simulate(plan_of("pp_dp_ep"), machine("h100"), steps=1), "step 1")
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask(server.url, "GET", f"/{server.token}/step").status)
    )
    asking.start()
    while server.reports._process is None:
        time.sleep(0.01)
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < LAST_WORDS + 2
    asking.join()
    assert answers == [204]
    assert server.reports._process.poll() is not None and threads_left() == []
