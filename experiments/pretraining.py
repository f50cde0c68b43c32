"""A pretraining run: its pools of problems, the policy, what is on disk, and its score."""

import dataclasses
import json
import pathlib
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.baselines.critical_path import critical_path
from doppler_jax.baselines.heft import heft
from doppler_jax.files import parse_json_object, read_text, write_json_atomic
from doppler_jax.graphs.families import HELD_OUT
from doppler_jax.graphs.padded import Sizes
from doppler_jax.policies.features import PolicyInputs
from doppler_jax.policies.model import PolicyConfig
from doppler_jax.policies.stacking import stack_problems
from doppler_jax.policy_files import load_policy, save_policy
from doppler_jax.training.best_known import Pool, make_pool, search
from doppler_jax.training.checkpoint import Policy
from doppler_jax.training.devices import everywhere, most_shards
from doppler_jax.training.pretrain import (
    Learning,
    Weights,
    begin_learning,
    evaluate,
    init_learning,
    pretrain_update,
)
from doppler_jax.training.stream import TRAINED, Bucket, Drawn, draw_problems
from experiments.grid import provenance

if TYPE_CHECKING:
    from experiments.pretrain import PretrainSettings

BUCKETS = {
    bucket.name: bucket
    for bucket in (
        Bucket(Sizes(64, 192, 16, 16, 64, 8), least_tasks=16, share=2.0),
        Bucket(Sizes(128, 320, 16, 16, 64, 4), least_tasks=40, share=2.0),
        Bucket(Sizes(128, 320, 16, 16, 64, 8), least_tasks=40, share=2.0),
        Bucket(Sizes(128, 320, 16, 16, 64, 4), least_tasks=40, share=1.0, links="serial"),
        Bucket(Sizes(128, 320, 16, 16, 64, 16), least_tasks=40, share=1.0),
        Bucket(Sizes(256, 640, 24, 24, 96, 4), least_tasks=120, share=1.5),
        Bucket(Sizes(256, 640, 24, 24, 96, 8), least_tasks=120, share=1.0),
        Bucket(Sizes(1024, 2560, 32, 32, 192, 8), least_tasks=400, share=0.1),
    )
}
MAY_CHANGE = ("budget_s", "validate_every_s", "host_devices", "run")
"""Settings that a run may be resumed with others of."""

SAMPLES = 64
"""Placements drawn of each held-out problem."""


@dataclasses.dataclass
class _Task:
    """A bucket's problems."""

    bucket: Bucket
    problems: PolicyInputs  # [K, ...], to train on
    held_out: Pool
    baselines: dict[str, np.ndarray]  # makespans of list schedulers on the held-out problems
    families: list[str]  # of the held-out problems


class Pretraining:
    """A run in a folder; `prepare` draws the problems or goes on where the run stopped."""

    def __init__(self, settings: "PretrainSettings", run: pathlib.Path) -> None:
        unknown = set(settings.buckets) - set(BUCKETS)
        if unknown:
            raise ValueError(f"unknown buckets {sorted(unknown)}; known: {sorted(BUCKETS)}")
        self._settings, self._run = settings, run
        self._check_same()
        self._initial = settings.initial and _params_of(settings.initial, settings.policy)
        self.seconds = 0.0
        self._updates = 0
        self._tasks: list[_Task] = []
        self._validations: list[dict[str, Any]] = []

    def _check_same(self) -> None:
        """Raises `ValueError` if the folder holds a run with other settings."""
        path = self._run / "validations.json"
        if not path.exists():
            return
        found = parse_json_object(path, read_text(path))["settings"]
        wanted = _plain(self._settings)
        names = [name for name in wanted if name not in MAY_CHANGE]
        differing = [name for name in names if found.get(name) != wanted[name]]
        if differing:
            raise ValueError(f"{path}: a run with other settings: {', '.join(differing)}")

    def prepare(self) -> None:
        """Draws the problems, searches the held-out ones, or restores what is on disk."""
        settings = self._settings
        for number, name in enumerate(sorted(BUCKETS)):
            if name in settings.buckets:
                self._tasks.append(self._make_task(BUCKETS[name], number))
                print(f"{name}: {settings.problems} problems", flush=True)
        problem = jax.tree.map(lambda leaf: leaf[0], self._tasks[0].problems)
        self._learning = init_learning(jax.random.key(settings.seed), settings.policy, problem)
        if self._initial is not None:
            self._learning = begin_learning(self._initial)
        for task in self._tasks:
            self._step(task, np.arange(settings.group), jax.random.key(0))  # compiles
        if (self._run / "state.npz").exists():
            self._restore()
            return
        for task in self._tasks:
            task.held_out = self._improve(task.held_out, task.bucket, settings.searches)
            print(f"{task.bucket.name}: {_ratios(task)}", flush=True)
        self.save()

    def update(self) -> None:
        """Does one step of the optimiser on some problems of one bucket."""
        settings = self._settings
        rng = np.random.default_rng([settings.seed, 3, self._updates])
        shares = np.array([task.bucket.share for task in self._tasks])
        task = self._tasks[int(rng.choice(len(shares), p=shares / shares.sum()))]
        chosen = rng.choice(settings.problems, settings.group, replace=False)
        key = jax.random.fold_in(jax.random.key(settings.seed), self._updates)
        self._learning = self._step(task, chosen, key)
        self._updates += 1

    def _step(self, task: _Task, chosen: np.ndarray, key: chex.PRNGKey) -> Learning:
        """Returns the learning after one update on the chosen problems."""
        shards = most_shards(self._settings.group)
        return pretrain_update(
            key,
            # Where the last update left it: elsewhere it would compile afresh.
            jax.device_put(self._learning, everywhere(shards)),
            jax.tree.map(lambda leaf: leaf[chosen], task.problems),
            self._weights(),
            policy=self._settings.policy,
            batch=self._settings.batch,
            links=task.bucket.links,
            shards=shards,
        )

    def validate(self) -> str:
        """Measures the policy on the held-out problems; returns a line, and keeps it."""
        scores: dict[str, list[np.ndarray]] = {}
        families: list[str] = []
        for task in self._tasks:
            greedy, two_greedy, best = evaluate(
                jax.random.key(self._settings.seed),
                jax.device_get(self._learning.params),
                task.held_out,
                policy=self._settings.policy,
                samples=SAMPLES,
                links=task.bucket.links,
            )
            found = {
                "greedy": greedy,
                "two greedy": two_greedy,
                f"best of {SAMPLES}": best,
                **task.baselines,
            }
            task.held_out.best_s[:] = np.minimum(task.held_out.best_s, np.asarray(best))
            for name, makespan_s in found.items():
                ratio = np.asarray(makespan_s) / task.held_out.best_s
                scores.setdefault(name, []).append(ratio)
            families += task.families
        is_new = np.isin(families, HELD_OUT)
        entry: dict[str, Any] = {"updates": self._updates, "seconds": round(self.seconds)}
        for name, ratios in scores.items():
            ratio = np.concatenate(ratios)
            entry[name] = {
                "held-out families": round(float(ratio[is_new].mean()), 4),
                "trained families": round(float(ratio[~is_new].mean()), 4),
                "buckets": [round(float(part.mean()), 3) for part in ratios],
            }
        self._validations.append(entry)
        return json.dumps(entry)

    def save(self) -> None:
        """Writes what the run goes on from, in one step."""
        self._run.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {
            f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(self._leaves())
        }
        temporary = self._run / "state.tmp.npz"
        np.savez(
            temporary, **arrays, updates=self._updates, seconds=self.seconds,
            validations=json.dumps(self._validations),
        )  # fmt: skip
        temporary.replace(self._run / "state.npz")
        write_json_atomic(
            self._run / "validations.json",
            {"settings": _plain(self._settings), "validations": self._validations},
        )

    def _leaves(self) -> list[Any]:
        """Returns all that changes in a run; the problems are drawn again."""
        kept: list[Any] = [self._learning]
        kept += [_searched(task.held_out) for task in self._tasks]
        return jax.tree.leaves(kept)

    def _restore(self) -> None:
        with np.load(self._run / "state.npz") as found:
            leaves = [found[f"leaf{i}"] for i in range(len(self._leaves()))]
            self._updates, self.seconds = int(found["updates"]), float(found["seconds"])
            self._validations = json.loads(str(found["validations"]))
        structure: Any = jax.tree.structure(self._learning)
        count = structure.num_leaves
        self._learning = jax.tree.unflatten(structure, map(jnp.asarray, leaves[:count]))
        rest = iter(leaves[count:])
        for task in self._tasks:
            for array in _searched(task.held_out):
                array[...] = next(rest)

    def _weights(self) -> Weights:
        settings = self._settings
        progress = min(self.seconds / settings.budget_s, 1.0)
        return Weights(
            learning_rate=jnp.float32(settings.learning_rate * (1 - 0.95 * progress)),
            entropy=jnp.float32(settings.entropy * (1 - progress)),
        )

    def _make_task(self, bucket: Bucket, number: int) -> _Task:
        settings = self._settings
        train = np.random.default_rng([settings.seed, 0, number])
        drawn = draw_problems(train, bucket, TRAINED, settings.problems)
        half = settings.held_out // 2
        unseen = np.random.default_rng([settings.seed, 1, number])
        held_out = draw_problems(unseen, bucket, HELD_OUT, settings.held_out - half)
        held_out += draw_problems(unseen, bucket, TRAINED, half)
        starts = [_list_schedules(one) for one in held_out]
        pool = jax.tree.map(np.array, make_pool(held_out, starts, bucket.links))
        # The chains begin with the two in turn.
        names = ("HEFT", "critical path")
        baselines = {name: pool.chain_s[:, i].copy() for i, name in enumerate(names)}
        families = [one.source for one in held_out]
        problems = jax.tree.map(np.array, stack_problems([one.problem for one in drawn]))
        return _Task(bucket, problems, pool, baselines, families)

    def _improve(self, pool: Pool, bucket: Bucket, times: int) -> Pool:
        key = jax.random.fold_in(jax.random.key(self._settings.seed), 2)
        for turn in range(times):
            pool = search(jax.random.fold_in(key, turn), pool, bucket.links)
        return jax.tree.map(np.array, pool)

    def export(self) -> pathlib.Path:
        """Writes the policy as it ships, and what it is; returns its folder."""
        folder = self._run / "base"
        meta = {
            "settings": _plain(self._settings),
            "updates": self._updates,
            "held_out": self._validations[-1],
            "provenance": provenance(),
            "command": shlex.join(["python", "-m", "experiments.pretrain", *sys.argv[1:]]),
        }
        if folder.exists():
            shutil.rmtree(folder)  # of an earlier end of this run
        params = jax.device_get(self._learning.params)
        save_policy(folder, Policy(params=params, config=self._settings.policy), meta)
        return folder


def _params_of(path: pathlib.Path, config: PolicyConfig) -> chex.ArrayTree:
    """Returns a policy's parameters, or raises a `ValueError` if it has another shape."""
    policy = load_policy(path)
    if policy.config != config:
        raise ValueError(f"{path}: {policy.config}, expected {config}")
    return policy.params


def _list_schedules(drawn: Drawn) -> np.ndarray:
    return np.stack([f(drawn.graph, drawn.costs) for f in (heft, critical_path)])


def _ratios(task: _Task) -> str:
    means = {k: float((v / task.held_out.best_s).mean()) for k, v in task.baselines.items()}
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())


def _searched(pool: Pool) -> tuple[Any, ...]:
    """Returns what searching a pool changes."""
    return (pool.best_placement, pool.best_s, pool.chain_placement, pool.chain_s)


def _plain(settings: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))
