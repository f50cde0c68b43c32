"""No plan can deadlock: random orders, and rings that have room for next to nothing."""

import os
from concurrent import futures

import jax
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.engine.processes import device, driver, line, session, transport
from doppler_jax.graphs.build import topological_order
from tests.kernels.conftest import X, at_home, check, check_trace, compile_on, random_program

NUM_TASKS = 12

NUM_PLANS = int(
    os.environ.get("DOPPLER_JAX_PLANS", "100")
)  # `experiments.engine` asks for more


class ThreadSession(session.Session):
    """Device processes that are threads of this one, with real rings between them."""

    backend = "threads"

    def __init__(self, count):
        super().__init__("cpu")
        self.num_processes = count
        settings = {"jax_enable_x64": jax.config.jax_enable_x64}
        secret = b"s" * 32
        self.workers = [
            device.Worker(index, "127.0.0.1", secret, settings) for index in range(count)
        ]
        self._pool = futures.ThreadPoolExecutor(4 * count)
        described = [worker.describe() for worker in self.workers]
        addresses = [address for address, *_ in described]
        self.lines = [line.Line(at, secret) for _, at, _, _ in described]
        connected = [self.call(index, "connect", addresses) for index in range(count)]
        assert not self.wait(connected, 60, for_all=True)[1]

    is_open = True

    def call(self, index, method, *args):
        return self._pool.submit(getattr(self.workers[index], method), *args)

    def wait(self, references, timeout_s, *, for_all=False):
        when = futures.ALL_COMPLETED if for_all else futures.FIRST_COMPLETED
        done, _ = futures.wait(references, timeout_s, when)
        return [r for r in references if r in done], [r for r in references if r not in done]

    def outcome(self, reference, wait_s=0.0):
        try:
            return reference.result(wait_s)
        except futures.TimeoutError:
            return None

    def lost(self, index):
        return None

    def close(self):
        for each in self.lines:
            each.hang_up()
        self._pool.shutdown()


@pytest.fixture
def threads(monkeypatch):
    """Three device processes whose rings hold less than the header of a packet."""
    monkeypatch.setattr(transport, "_CAPACITY", 24)
    started = ThreadSession(3)
    try:
        yield driver.ProcessDevices(
            [
                session.ProcessDevice(f"d{i}", "thread", i, session.this_host(), started)
                for i in range(3)
            ]
        )
    finally:
        started.close()


def random_plan(seed, num_devices):
    """A random program with inputs at random homes, on random devices in a random order."""
    rng = np.random.default_rng(seed)
    sharded = random_program(seed % 50, NUM_TASKS)  # of which kernels are exported once
    sharded = at_home(sharded, rng.integers(-1, num_devices, 3))
    ranks = np.argsort(topological_order(sharded.graph, rng.permutation(NUM_TASKS)))
    return sharded, dj.Plan(rng.integers(0, num_devices, NUM_TASKS), ranks, "in_order")


def run_plans(devices, seeds):
    """Runs a plan per seed, and judges its result and its trace."""
    for seed in seeds:
        sharded, plan = random_plan(seed, len(devices))
        check(sharded, dj.compile(sharded, plan, devices=devices, timeout_s=60), rtol=1e-4)


def test_no_order_waits_for_ever_where_rings_are_tiny(threads):
    run_plans(threads, range(NUM_PLANS))


@pytest.mark.parametrize("mode", ["in_order", "stream"])
def test_no_order_waits_for_ever_in_this_process(local, mode):
    for seed in range(100):
        sharded, plan = random_plan(seed, 4)
        options = {"mode": mode, "priority": plan.priority, "timeout_s": 60}
        step = compile_on(sharded, plan.placement, local, 4, **options)
        np.testing.assert_array_equal(step.plan.priority, plan.priority)
        step(X)
        check_trace(step)


def test_no_order_waits_for_ever_on_ray(ray_pair):
    run_plans(ray_pair, range(25))
