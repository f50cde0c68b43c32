"""What device processes are made of, without any: one clock, rings of memory, the mesh."""

import contextlib
import gc
import os
import socket
import threading
import types

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.agenda import make_agenda
from doppler_jax.engine.processes import driver, line, transport
from doppler_jax.engine.processes.device import DeviceResult
from doppler_jax.engine.processes.transport import NO_OFFER, Inlet, Mesh, Outlet, Packet, Ring
from doppler_jax.engine.trace import Chores
from tests.kernels.conftest import build

SHARDED = build([("make", []), ("mean", ["t0", "t0"]), ("mean", ["t1", "t1"])], ["t2"])
AGENDA = make_agenda(SHARDED, dj.Plan(np.array([0, 1, 0])))


def results(ahead_s):
    """Tasks of 1 s and transfers of 0.1 s on devices whose clocks are 10 s, and `ahead_s`."""
    a, b, no_more = 10.0, ahead_s, ({}, None)
    tasks = [(0, a, a + 1.0), (2, a + 2.2, a + 3.2)]
    handling = [(a + 1.0, a + 1.05), (a + 2.1, a + 2.2)]
    first = DeviceResult(tasks, [(1, b + 2.1, a + 2.2)], handling, *no_more)
    tasks, handling = [(1, b + 1.1, b + 2.1)], [(b + 1.0, b + 1.1)]
    return [first, DeviceResult(tasks, [(0, a + 1.0, b + 1.1)], handling, *no_more)]


@pytest.mark.parametrize("error_s", [0.0, 0.05, 0.5, -0.5])
def test_no_tensor_arrives_before_it_is_sent(error_s):
    chores = Chores()
    record = driver.make_record(AGENDA, results(7.0), [10.0, 7.0 + error_s], chores)
    trace = record.schedule()
    dj.simulator.validate(SHARDED.graph, trace, tolerance=1e-12)
    assert trace.start_s.min() == 0.0
    # Moved no further than causes and effects ask for.
    np.testing.assert_allclose(trace.start_s[1], 1.1 - np.clip(error_s, -0.1, 0.1), atol=1e-9)
    np.testing.assert_allclose(trace.finish_s[2], 3.2, atol=1e-9)
    # What a device spends on transfers keeps its distance from its tasks.
    device, start_s, finish_s = np.transpose(record.handling)
    assert device.tolist() == [0, 0, 1]
    np.testing.assert_allclose(start_s[:2], [1.0, 2.1], atol=1e-9)
    np.testing.assert_allclose(finish_s[1:], trace.start_s[[2, 1]], atol=1e-9)


def test_clocks_of_other_machines_are_read_by_round_trips(monkeypatch):
    now = [0.0]

    def answer(devices, method, arguments):
        now[0] += 0.25  # on the way there
        there_s = now[0] + 100.0
        now[0] += 0.25
        return [there_s]

    monkeypatch.setattr(driver, "ask_all", answer)
    monkeypatch.setattr(driver, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    here = types.SimpleNamespace(host=driver.this_host())
    there = types.SimpleNamespace(host="another")
    assert driver.clock_offsets_s([here, there]) == [0.0, 100.0]


SIZES = (0, 100, 70_000, 1 << 20, transport._CAPACITY, transport._CAPACITY + 12_345)


class Inbox:
    def __init__(self):
        self.items, self.gone = [], []
        self.changed = threading.Condition()

    def arrived(self, call, item, start_s, body):
        with self.changed:
            self.items.append((call, item, start_s, body))
            self.changed.notify_all()

    def lost(self, peer):
        with self.changed:
            self.gone.append(peer)
            self.changed.notify_all()

    def wait(self, done):
        with self.changed:
            assert self.changed.wait_for(lambda: done(self), 30)


def connect_two(shares_memory=(True, True)):
    inboxes = [Inbox(), Inbox()]
    meshes = [Mesh(i, "127.0.0.1", b"secret", inboxes[i], shares_memory[i]) for i in range(2)]
    addresses = [mesh.address for mesh in meshes]
    other = threading.Thread(target=meshes[1].connect, args=(addresses,))
    other.start()
    meshes[0].connect(addresses)
    other.join()
    return meshes, inboxes


class Sender:
    def __init__(self, bodies):
        self.bodies, self.told = bodies, []

    def open(self, item):
        body = self.bodies[item]
        if isinstance(body, Exception):
            raise body
        return None if body is None else (0.5, body)

    def sent(self, item):
        self.told.append(item)

    def failed(self, item, error):
        self.told.append((item, error))


@pytest.mark.parametrize(
    ("shares_memory", "has_rings"),
    [((True, True), True), ((False, False), False), ((True, False), False)],
)
def test_bodies_arrive_whole_and_in_order(shares_memory, has_rings):
    meshes, inboxes = connect_two(shares_memory)
    assert [mesh.has_rings for mesh in meshes] == [has_rings] * 2
    rng = np.random.default_rng(0)
    bodies = [rng.integers(0, 256, size, np.uint8) for size in SIZES * 2]
    senders = [Sender(bodies), Sender(bodies)]
    for source, sender in enumerate(senders):
        for item in range(len(bodies)):
            meshes[source].send(1 - source, Packet(7, item, sender))
    while has_rings and any(mesh.poll() for mesh in meshes):
        pass
    for inbox in inboxes:
        inbox.wait(lambda inbox: len(inbox.items) == len(bodies))
        for item, (call, number, start_s, body) in enumerate(inbox.items):
            assert (call, number, start_s) == (7, item, 0.5)
            np.testing.assert_array_equal(body, bodies[item])
            assert body.size == 0 or body.ctypes.data % 64 == 0
    if has_rings:  # else a thread tells it after the body has arrived
        assert [sender.told for sender in senders] == [[*range(len(bodies))]] * 2


def test_what_finds_no_room_goes_later_and_what_is_unwanted_never():
    ring, offer = Ring.create()
    outlet, inlet = Outlet(ring), Inlet(Ring.attach(offer))
    large = np.arange(transport._CAPACITY + 5, dtype=np.uint8)
    error = MemoryError("none left")
    sender = Sender((large, None, error, large[:3]))
    for item in range(len(sender.bodies)):
        outlet.send(Packet(1, item, sender))
    assert sender.told == []  # the first is not out yet
    assert inlet.receive() is None
    assert outlet.flush()
    assert sender.told == [0, (2, error), 3]
    first, second = inlet.receive(), inlet.receive()
    assert (first[1], second[1]) == (0, 3)
    np.testing.assert_array_equal(first[3], large)
    assert inlet.receive() is None
    assert not outlet.flush()


def test_what_is_not_the_writers_is_refused():
    ring, offer = Ring.create()
    assert Ring.attach(NO_OFFER) is None
    assert Ring.attach(offer[:-1] + bytes([offer[-1] ^ 1])) is None
    assert Ring.attach(offer) is not None
    del ring


def memory_files():
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("memfd:doppler" in name for name in names)


def test_rings_leave_nothing_behind():
    gc.collect()
    before = memory_files()
    ring, offer = Ring.create()
    reader = Ring.attach(offer)
    assert memory_files() > before
    ring.taken()
    del ring, reader
    gc.collect()
    assert memory_files() == before


def test_a_line_outlives_errors_and_answers_only_who_knows_the_secret():
    def answer(method, *args):
        return None if method == "note" else args[0][args[1]]

    arrays = [np.arange(n, dtype=np.float32) for n in (0, 3, 1 << 20)]
    listener = socket.create_server(("127.0.0.1", 0))  # which `serve` has for ever
    arguments = listener, b"secret", answer
    threading.Thread(target=line.serve, args=arguments, daemon=True).start()
    right, wrong = (line.Line(listener.getsockname()[:2], s) for s in (b"secret", b"secreT"))
    wrong.send("item", arrays[:2], 0)
    assert isinstance(wrong.receive(), OSError)
    wrong.hang_up()
    right.send("note")
    for number in (0, 1, 2, 3, 2):
        right.send("item", arrays, number)
        assert line.wait({7: right}, 60) == [7]
        found = right.receive()
        if number == 3:
            assert isinstance(found, RuntimeError)
            assert "IndexError" in str(found)
        else:
            np.testing.assert_array_equal(found, arrays[number])
    assert line.wait({7: right}, 0) == []
    right.send("item", arrays, 2)
    right.hang_up()  # in the middle of an answer
    right.send("item", arrays, 1)
    np.testing.assert_array_equal(right.receive(), arrays[1])
    right.hang_up()
