"""Three steps of a small decoder on a mesh: what layouts are compared by.

  python tests/mesh_program.py OUT COORDINATOR PROCESSES PROCESS

runs every layout as one process of several and writes what the first one saw.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Meshes, numbers of groups that their shards divide or do not, and how many of
# these may have a right answer: of 8 the first 3 are all one process's, so that
# of two the other keeps none.
CASES = (
  ((8, 1, 1), 5, 5),
  ((2, 2, 2), 5, 5),
  ((1, 4, 2), 8, 3),
)


def steps(
  mesh, num_groups, able, *, sampling=None, dtype=jnp.float64, number=3
):
  """What three steps drew, and where they led; all as numpy."""
  from groupstd import (
    learners,
    losses,
    partitions,
    policies,
    rollouts,
    sharding,
    sigma,
    tasks,
    transformer,
  )

  config = transformer.Config(
    12, width=16, num_layers=1, num_heads=4, num_kv_heads=2, qkv_bias=True
  )
  rules = partitions.TRANSFORMER
  policy = sharding.spread(
    transformer.policy(
      config, length=5, stop=(1,), lay=sharding.lay_groups(mesh)
    ),
    mesh,
    sampling,
    rules=rules,
    in_use=partitions.TRANSFORMER_IN_USE,
  )

  def prompts(step, number):
    rng = np.random.default_rng(int(step))
    ids = np.arange(number)
    mask = np.arange(4) >= rng.integers(0, 3, number)[:, None]
    return ids, policies.Prompts(rng.integers(0, 12, mask.shape), mask, ids)

  def reward(prompts, tokens, mask):
    low = ((tokens < 6) & mask).sum(axis=2) * 2 > mask.sum(axis=2)
    low &= np.asarray(prompts.index)[:, None] < able
    return low.astype(np.float32), np.ones(low.shape, bool)

  collect = rollouts.collector(
    policy,
    tasks.Task(prompts, reward),
    num_groups=num_groups,
    group_size=4,
    max_draws=2,
  )
  # Its state is the last gradient.
  optimizer = optax.chain(optax.trace(0.0), optax.adam(1e-2))
  learner = learners.policy_gradient(
    policy,
    optimizer,
    sigma.rule(sigma.dapo()),
    surrogate=losses.clipped(),
    kl_coef=0.1,
    micro_batches=2,
  )
  learner = sharding.sharded(learner, mesh, rules)
  place = sharding.place(
    lambda key: jax.tree.map(
      # From one precision, whatever is computed in.
      lambda x: x.astype(jnp.float32).astype(dtype),
      policy.init(key),
    ),
    mesh,
    rules,
  )
  move = sharding.place(lambda x: x, sampling or mesh, rules)
  state = learner.init(place(jax.random.key(0)))
  found = []
  for _ in range(number):
    rollout, counts = collect(move(state.params), state.step)
    state, info = learner.step(state, rollout)
    found.append(
      rollouts.on_host(
        jax.tree.map(
          jnp.asarray,
          {
            "tokens": rollout.tokens,
            "rewards": rollout.rewards,
            "drawn": counts.drawn,
            "kept": info.kept,
            "gradient": state.opt_state[0].trace,
            "loss": info.loss,
            "params": state.params,
          },
        )
      )
    )
  return found


def main(out, coordinator, processes, process):
  import pickle

  from groupstd import sharding

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8 // processes)
  jax.config.update("jax_enable_x64", True)
  jax.distributed.initialize(coordinator, processes, process)
  found = {
    case: steps(sharding.make_mesh(*case[0]), *case[1:]) for case in CASES[1:]
  }
  if process == 0:
    pathlib.Path(out).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
