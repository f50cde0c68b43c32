import contextlib
import gc
import os
import threading

import numpy as np
import pytest

from kernels import ray_mesh, ray_shared
from kernels.ray_mesh import Mesh, Packet
from kernels.ray_shared import NO_OFFER, PIECE, Ring

SIZES = (0, 100, 70_000, PIECE, PIECE + 1, 3 * PIECE, ray_shared._CAPACITY + 12_345)


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


def connect_two():
    inboxes = [Inbox(), Inbox()]
    meshes = [Mesh(i, "127.0.0.1", b"secret", inboxes[i]) for i in range(2)]
    addresses = [mesh.address for mesh in meshes]
    other = threading.Thread(target=meshes[1].connect, args=(addresses,))
    other.start()
    meshes[0].connect(addresses)
    other.join()
    return meshes, inboxes


def send(mesh, peer, item, body):
    sent = threading.Event()
    errors = []
    packet = Packet(7, item, lambda: (0.5, body), sent.set, errors.append)
    mesh.send(peer, packet)
    return sent, errors


@pytest.fixture(params=["shared memory", "TCP"])
def is_shared(request, monkeypatch):
    if request.param == "TCP":
        monkeypatch.setattr(Ring, "attach", lambda offer: None)
    return request.param == "shared memory"


def test_bodies_arrive_whole_and_in_order(is_shared, monkeypatch):
    through_rings = []
    write = Ring.write

    def watched(ring, piece):
        through_rings.append(piece.size)
        write(ring, piece)

    monkeypatch.setattr(Ring, "write", watched)
    meshes, inboxes = connect_two()
    rng = np.random.default_rng(0)
    bodies = [rng.integers(0, 256, size, np.uint8) for size in SIZES * 3]
    for source in range(2):
        for item, body in enumerate(bodies):
            send(meshes[source], 1 - source, item, body)
    for inbox in inboxes:
        inbox.wait(lambda inbox: len(inbox.items) == len(bodies))
        for item, (call, number, start_s, body) in enumerate(inbox.items):
            assert (call, number, start_s) == (7, item, 0.5)
            np.testing.assert_array_equal(body, bodies[item])
            assert body.size == 0 or body.ctypes.data % 64 == 0
    large = sum(body.size for body in bodies if body.size > ray_mesh._SMALL)
    assert sum(through_rings) == (2 * large if is_shared else 0)


def test_a_writer_waits_for_room_and_learns_that_the_reader_is_gone():
    ring, offer = Ring.create()
    reader = Ring.attach(offer)
    piece = np.arange(PIECE, dtype=np.uint8)
    for _ in range(ray_shared._CAPACITY // PIECE):
        ring.write(piece)
    writer = threading.Thread(target=ring.write, args=(piece[:10],))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    reader.read(np.empty(10, np.uint8))
    writer.join(30)
    assert not writer.is_alive()
    failures = []

    def write():
        try:
            ring.write(piece)
        except ConnectionError as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    ring.close()
    writer.join(30)
    assert len(failures) == 1


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
