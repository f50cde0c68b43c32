"""The base policy: one for many graphs and clusters, by policy gradient on each.

`pretrain` is the command; `Pretraining` has the problems of a run and its update, which
`loop.train` repeats in the run's folder.
"""

import dataclasses
import datetime
import json
import math
import pathlib
import shlex
import shutil
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array, ArrayTree, PRNGKey

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.heft import heft
from doppler_jax.budget import Budget
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.objective import Objective
from doppler_jax.policies import model, rollout
from doppler_jax.policies.features import PolicyInputs, stack_problems
from doppler_jax.policies.model import PolicyConfig, init_list_scheduler
from doppler_jax.policy_files import load_policy, save_policy
from doppler_jax.problems import use_host_devices
from doppler_jax.simulator.batches import simulate_padded
from doppler_jax.simulator.simulate import simulate
from doppler_jax.training.devices import CUT, WHOLE, cut_over, everywhere, most_shards
from doppler_jax.training.loop import Phase, RunFolder, train
from doppler_jax.training.pools import (
    BUCKETS,
    TRAINED,
    Bucket,
    Drawn,
    best_known_s,
    draw_problems,
)
from doppler_jax.training.reinforce import (
    Lesson,
    count_batch,
    loss_and_gradient,
    normalised_advantage,
)
from doppler_jax.training.settings import check_settings
from doppler_jax.training.state import TrainState, descend, init_state, make_optimizer
from doppler_jax.types import Policy, pytree

MAY_CHANGE = ("budget_s", "validate_every_s", "host_devices", "run")
"""Settings that a run may be resumed with others of."""

SAMPLES = 64
"""Placements drawn of each held-out problem."""


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    """Pretraining: one policy for many graphs and clusters."""

    budget_s: float = 4500.0
    """Seconds of training, those before the run was resumed counted; preparing is extra."""
    buckets: tuple[str, ...] = ("64x8", "128x4", "128x8", "256x4", "128x16")
    """Tasks x devices to train on; others are 256x8, 1024x8, and 128x4s with serial links."""
    problems: int = 1500
    """Problems of each bucket."""
    held_out: int = 20
    """Problems of each bucket that only measure, half of them of families never trained on."""
    search_evaluations: int = 20_000
    """Simulations of the search for the best known placement of every held-out problem."""
    group: int = 8
    """Problems of an update."""
    batch: int = 16
    """Episodes of each."""
    learning_rate: float = 1e-3
    """At the start; it falls to a twentieth."""
    entropy: float = 1e-2
    """Weight of the entropy at the start, beside the policy gradient's 1; it falls to 0."""
    validate_every_s: float = 300.0
    """Seconds between measurements of the held-out problems, and between checkpoints."""
    host_devices: int = 2
    """Devices that the CPU is split into; an update's problems are cut over them."""
    seed: int = 0
    initial: pathlib.Path | None = None
    """A policy of these sizes to go on from, in place of a list scheduler."""
    run: pathlib.Path = pathlib.Path("runs/pretrain")
    """Folder of the run; what ships is in its `base`."""
    policy: PolicyConfig = dataclasses.field(
        default_factory=lambda: PolicyConfig(width=48, rounds=4, features="general")
    )


def pretrain(settings: PretrainSettings, num_updates: float = math.inf) -> pathlib.Path:
    """Does `doppler train pretrain`: trains while the budget lasts, and says how well.

    Args:
      settings: of the run; a run of the same ones in its folder goes on.
      num_updates: ends it earlier.

    Returns:
      The folder of the policy as it ships.

    Raises:
      ValueError: a setting is invalid, or the folder has a run with other ones.
    """
    check_settings(settings)
    use_host_devices(settings.host_devices)
    run = Pretraining(settings)
    kept = {k: v for k, v in _plain(settings).items() if k not in MAY_CHANGE}
    with RunFolder(settings.run, kept, settings.policy, settings.validate_every_s) as folder:
        state = folder.resume(run.prepare())
        if folder.is_new:
            state = run.search(state)
            folder.save(state, 0.0)
        run.budget = Budget(seconds=settings.budget_s).after(folder.spent_s)
        state, scores = run.validate(state)
        print(json.dumps(scores), flush=True)
        phase = Phase(begin=run.begin, update=run.update, num_updates=num_updates)
        state, _ = train(phase, state, run.budget, folder=folder)
        _, scores = run.validate(state)
        print(json.dumps(scores))
    base = _export(settings, state, scores)
    print(f"base policy in {base}")
    return base


@pytree
class PretrainState(TrainState):
    """What pretraining carries from update to update."""

    held_out_s: Array  # [P] best known makespans of the held-out problems of all buckets


@dataclasses.dataclass
class _Task:
    """A bucket's problems."""

    bucket: Bucket
    problems: PolicyInputs  # [K, ...], to train on
    held_out: PolicyInputs  # [H, ...]
    listed_s: np.ndarray  # [2, H] makespans of `_list_schedules` on the held-out problems
    drawn: list[Drawn]  # the held-out problems


class Pretraining:
    """The problems of a run, its updates and its scores."""

    def __init__(self, settings: PretrainSettings) -> None:
        """Takes the settings.

        Raises:
          ValueError: a bucket is unknown, or the initial policy has another shape.
        """
        unknown = set(settings.buckets) - set(BUCKETS)
        if unknown:
            raise ValueError(f"unknown buckets {sorted(unknown)}; known: {sorted(BUCKETS)}")
        self._settings = settings
        self._initial = settings.initial and load_policy(settings.initial)
        if self._initial and self._initial.config != settings.policy:
            raise ValueError(
                f"{settings.initial}: {self._initial.config}, expected {settings.policy}"
            )
        self._tasks: list[_Task] = []
        self._validated_s = 0.0
        self.budget = Budget(seconds=settings.budget_s)

    def prepare(self) -> PretrainState:
        """Draws the problems and compiles; returns the state before the first update."""
        settings = self._settings
        for number, name in enumerate(sorted(BUCKETS)):
            if name in settings.buckets:
                self._tasks.append(self._make_task(BUCKETS[name], number))
                print(f"{name}: {settings.problems} problems", flush=True)
        if self._initial:
            state = self.begin(self._initial.params)
        else:
            key, problem = jax.random.key(settings.seed), self._tasks[0].drawn[0].problem
            state = self.begin(init_list_scheduler(key, settings.policy, problem))
        for task in self._tasks:
            self._step(state, task, np.arange(settings.group))
        return state

    def begin(self, params: ArrayTree) -> PretrainState:
        """Returns the state before the first update of some parameters."""
        count = sum(len(task.drawn) for task in self._tasks)
        problem, key = self._tasks[0].drawn[0].problem, jax.random.key(self._settings.seed)
        return begin_pretraining(key, params, problem, np.full(count, np.inf, np.float32))

    def search(self, state: PretrainState) -> PretrainState:
        """Returns the state with placements known of the held-out problems."""
        seed, count = self._settings.seed, self._settings.search_evaluations
        best_s = [
            best_known_s(one, _list_schedules(one), seed, task.bucket.links, count)
            for task in self._tasks
            for one in task.drawn
        ]
        return dataclasses.replace(state, held_out_s=jnp.asarray(best_s, jnp.float32))

    def update(self, state: PretrainState) -> tuple[PretrainState, dict[str, Any]]:
        """Takes a step on some problems of one bucket, and measures if it is time to."""
        settings = self._settings
        rng = np.random.default_rng([settings.seed, 3, int(state.update)])
        shares = np.array([task.bucket.share for task in self._tasks])
        task = self._tasks[int(rng.choice(len(shares), p=shares / shares.sum()))]
        chosen = rng.choice(settings.problems, settings.group, replace=False)
        state, loss = self._step(state, task, chosen)
        metrics: dict[str, Any] = {"loss": loss}
        if self.budget.seconds_spent() - self._validated_s >= settings.validate_every_s:
            state, scores = self.validate(state)
            print(json.dumps(scores), flush=True)
            for name, of in scores["ratios"].items():
                metrics |= {f"{name}, {kind}": of[kind] for kind in KINDS}
        return state, metrics

    def _step(
        self, state: PretrainState, task: _Task, chosen: np.ndarray
    ) -> tuple[PretrainState, Array]:
        settings, shards = self._settings, most_shards(self._settings.group)
        progress = self.budget.progress(0)
        return pretrain_update(
            # Where the last update left it: elsewhere it would compile afresh.
            jax.device_put(state, everywhere(shards)),
            jax.tree.map(lambda leaf: leaf[chosen], task.problems),
            jnp.float32(settings.learning_rate * (1 - 0.95 * progress)),
            jnp.float32(settings.entropy * (1 - progress)),
            policy=settings.policy,
            batch=settings.batch,
            links=task.bucket.links,
            shards=shards,
        )

    def validate(self, state: PretrainState) -> tuple[PretrainState, dict[str, Any]]:
        """Measures the policy on the held-out problems, of which it may find better placements.

        Returns:
          The state with what was found, and all placements' mean ratios to the best known.
        """
        found_s = []  # of each bucket `[5, H]`, by `MEASURED`
        for task in self._tasks:
            of_policy = evaluate(
                jax.random.key(self._settings.seed),
                jax.device_get(state.params),
                task.held_out,
                policy=self._settings.policy,
                samples=SAMPLES,
                links=task.bucket.links,
            )
            found_s.append(np.stack([*of_policy, *task.listed_s]))
        sampled_s = np.concatenate([part[MEASURED.index(BEST_SAMPLED)] for part in found_s])
        best_s = np.minimum(state.held_out_s, sampled_s)
        ends = np.cumsum([len(task.drawn) for task in self._tasks])
        parts = [
            of / known for of, known in zip(found_s, np.split(best_s, ends[:-1]), strict=True)
        ]
        ratio = np.concatenate(parts, axis=1)
        is_new = np.isin([one.source for task in self._tasks for one in task.drawn], HELD_OUT)
        ratios = {
            name: {
                **{
                    kind: round(float(ratio[k, mask].mean()), 4)
                    for kind, mask in zip(KINDS, (is_new, ~is_new), strict=True)
                },
                "buckets": [round(float(part[k].mean()), 3) for part in parts],
            }
            for k, name in enumerate(MEASURED)
        }
        self._validated_s = self.budget.seconds_spent()
        scores = {"updates": int(state.update), "seconds": round(self._validated_s)}
        state = dataclasses.replace(state, held_out_s=jnp.asarray(best_s))
        return state, {**scores, "ratios": ratios}

    def _make_task(self, bucket: Bucket, number: int) -> _Task:
        settings = self._settings
        train = np.random.default_rng([settings.seed, 0, number])
        drawn = draw_problems(train, bucket, TRAINED, settings.problems)
        half = settings.held_out // 2
        unseen = np.random.default_rng([settings.seed, 1, number])
        held_out = draw_problems(unseen, bucket, HELD_OUT, settings.held_out - half)
        held_out += draw_problems(unseen, bucket, TRAINED, half)
        run = partial(simulate, objective=Objective(bucket.links))
        listed_s = [
            run(one.graph, one.costs, _list_schedules(one)).makespan_s for one in held_out
        ]
        return _Task(
            bucket=bucket,
            problems=stack_problems([one.problem for one in drawn]),
            held_out=stack_problems([one.problem for one in held_out]),
            listed_s=np.transpose(listed_s),
            drawn=held_out,
        )


BEST_SAMPLED = f"best of {SAMPLES}"
MEASURED = ("greedy", "two greedy", BEST_SAMPLED, "HEFT", "critical path")
"""What is measured on held-out problems."""

KINDS = ("held-out families", "trained families")
"""Kinds of held-out problems: of families never trained on, and of the others."""


def _list_schedules(drawn: Drawn) -> np.ndarray:
    """Returns placements `[2, n]`, by HEFT and along the critical path."""
    return np.stack([f(drawn.graph, drawn.costs) for f in (heft, critical_path)])


def _export(
    settings: PretrainSettings, state: PretrainState, scores: dict[str, Any]
) -> pathlib.Path:
    """Writes the policy as it ships, and what it is; returns its folder."""
    folder = settings.run / "base"
    meta = {
        "settings": _plain(settings),
        "updates": scores["updates"],
        "held_out": scores["ratios"],
        "provenance": {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        },
        "command": shlex.join(["python", "-m", "doppler_jax", *sys.argv[1:]]),
    }
    if folder.exists():
        shutil.rmtree(folder)  # of an earlier end of this run
    params = jax.device_get(state.params)
    save_policy(folder, Policy(params=params, config=settings.policy), meta)
    return folder


def _plain(settings: PretrainSettings) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def begin_pretraining(
    key: PRNGKey, params: ArrayTree, problem: PolicyInputs, held_out_s: np.ndarray
) -> PretrainState:
    """Returns the state before the first update; the key is consumed."""
    params = jax.tree.map(jnp.asarray, params)
    start = init_state(key, params, make_optimizer(0.0), problem, num_elites=0, num_chains=0)
    fields = {field.name: getattr(start, field.name) for field in dataclasses.fields(start)}
    return PretrainState(**fields, held_out_s=jnp.asarray(held_out_s))


@partial(jax.jit, static_argnames=("policy", "batch", "links", "shards"))
def pretrain_update(
    state: PretrainState,
    problems: PolicyInputs,
    learning_rate: Array,
    entropy_weight: Array,
    *,
    policy: PolicyConfig,
    batch: int,
    links: str,
    shards: int = 1,
) -> tuple[PretrainState, Array]:
    """Does one step of the optimiser on G problems.

    Args:
      state: the state.
      problems: G of one bucket, stacked.
      learning_rate: `[]`, traced, so that it may change in a run.
      entropy_weight: `[]` likewise, beside the policy gradient's 1.
      policy: sizes of the networks.
      batch: episodes of each problem, 1 or more.
      links: of what is simulated.
      shards: local devices over which the problems are cut; a divisor of G.

    Returns:
      The new state and the mean loss.
    """

    def learn(
        keys: PRNGKey, params: ArrayTree, problems: PolicyInputs, entropy_weight: Array
    ) -> tuple[Array, ArrayTree]:
        """Returns losses and gradients of problems, stacked, computed one after another."""

        def one(inputs: tuple[PRNGKey, PolicyInputs]) -> tuple[Array, ArrayTree]:
            key, problem = inputs
            tables, pull_back = jax.vjp(lambda p: model.apply(p, policy, problem), params)
            episodes = jax.vmap(rollout.sample, in_axes=(0, None, None))(
                jax.random.split(key, batch), problem, tables
            )
            makespan_s = simulate_padded(
                problem.padded, episodes.placement, links=links
            ).makespan_s
            lesson = Lesson(
                episodes=episodes,
                weight=normalised_advantage(makespan_s) / batch,
                entropy_weight=jnp.full(batch, entropy_weight / batch),
            )
            loss, gradient = loss_and_gradient(problem, tables, lesson)
            return loss, pull_back(gradient)[0]

        return jax.lax.map(one, (keys, problems))

    count = problems.unit_s.shape[0]
    keys = jax.random.split(jax.random.fold_in(state.key, state.update), count)
    run_cut = cut_over(shards, learn, (CUT, WHOLE, CUT, WHOLE), CUT)
    losses, gradients = run_cut(keys, state.params, problems, entropy_weight)
    gradient = jax.tree.map(lambda leaf: leaf.mean(0), gradients)
    params, opt_state = descend(state, gradient, make_optimizer(learning_rate))
    state = dataclasses.replace(state, params=params, opt_state=opt_state)
    spent = count * batch
    return count_batch(state, episodes=spent, evaluations=spent), losses.mean()


@partial(jax.jit, static_argnames=("policy", "samples", "links"))
def evaluate(
    key: PRNGKey,
    params: ArrayTree,
    problems: PolicyInputs,
    *,
    policy: PolicyConfig,
    samples: int,
    links: str,
) -> tuple[Array, Array, Array]:
    """Returns the makespans `[G]` of a policy's placements.

    Of the greedy one in SEL's order, of the better of it and the one in the order of b-levels,
    and of the best of these and samples.

    Args:
      key: of the draws; it is consumed.
      params: the policy's.
      problems: G of one bucket, stacked.
      policy: sizes of the networks.
      samples: placements drawn of each problem.
      links: of what is simulated.
    """

    def one(inputs: tuple[PRNGKey, PolicyInputs]) -> tuple[Array, Array, Array]:
        key, problem = inputs
        tables = model.apply(params, policy, problem)
        keys = jax.random.split(key, samples)
        drawn = jax.vmap(rollout.sample, in_axes=(0, None, None))(keys, problem, tables)
        likeliest, _ = rollout.greedy_plans(problem, tables)
        placements = jnp.concatenate([likeliest, drawn.placement])
        makespan_s = simulate_padded(problem.padded, placements, links=links).makespan_s
        return makespan_s[0], makespan_s[:2].min(), makespan_s.min()

    count = problems.unit_s.shape[0]
    return jax.lax.map(one, (jax.random.split(key, count), problems))
