"""The controlled run of arXiv:2607.00152: what an arm measured, and was to.

Arms are trained by `experiments.train.run`, in a folder each; here their
metrics are read, predicted from the operation alone, and drawn. Importing this
does not import jax.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

# An ml_collections.ConfigDict, of whose fields a type checker knows nothing.
Config = Any

ARMS = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO (redraw)"}
COLORS = {"grpo": "#1f6fb4", "dr_grpo": "#d9822b", "dapo": "#3a8f4d"}
# Groups drawn of every prompt to measure the mass of the first update.
_MASS_DRAWS = 64
_BINS = np.linspace(0, 1, 11)


class Arm(NamedTuple):
  """What one arm measured, and what theory says of it.

  Attributes:
    name: the method's.
    steps: by name, [S + 1] of what metrics.jsonl holds, NaN where nothing.
    mass: [10] share of the first update by bin of p, measured.
    mass_error: [10] its standard error.
    predicted_mass: [10] of the same population.
    predicted_quarter: [S + 1] the hardest quarter's expected mean p.
  """

  name: str
  steps: dict[str, np.ndarray]
  mass: np.ndarray
  mass_error: np.ndarray
  predicted_mass: np.ndarray
  predicted_quarter: np.ndarray

  @property
  def silent(self) -> np.ndarray:
    """[S] measured share of first draws that are silent."""
    return (self.steps["first_silent"] / self.steps["first_draws"])[:-1]

  @property
  def predicted_silent(self) -> np.ndarray:
    """[S] E[p^G + (1 − p)^G] over the prompts as they are at that step."""
    return self.steps["predicted_silent"][:-1]

  @property
  def quarter(self) -> np.ndarray:
    """[S + 1] mean p of the prompts that were hardest at the start."""
    return self.steps["hardest_quarter_p"]

  @property
  def drawn(self) -> np.ndarray:
    """[S + 1] rollouts drawn so far."""
    return np.append(0, np.cumsum(self.steps["drawn"][:-1]))

  def r2(self) -> tuple[float, float]:
    """R² of the silent share against its prediction, and its noise ceiling."""
    measured = self.silent
    spread = np.sum((measured - measured.mean()) ** 2)
    residual = np.sum((measured - self.predicted_silent) ** 2)
    noise = np.sum(self.steps["predicted_silent_variance"][:-1])
    return 1 - residual / spread, 1 - noise / spread

  def oversampling(self) -> tuple[float, float]:
    """Groups drawn per prompt and step, measured and predicted."""
    in_batch = self.steps["drawn"][:-1] - self.steps["dropped"][:-1]
    drawn = self.steps["drawn"][:-1].sum() / in_batch.sum()
    return drawn, self.steps["predicted_draws"][:-1].mean()

  def extreme_mass(self) -> tuple[float, float, float]:
    """Share of the outer two bins: measured, its error, predicted."""
    outer = [0, -1]
    error = float(np.hypot(*self.mass_error[outer]))
    return self.mass[outer].sum(), error, self.predicted_mass[outer].sum()


def measure(name: str, config: Config, folder: pathlib.Path) -> Arm:
  """What the arm that was trained in folder/name came to."""
  from experiments import scalar, workdir
  from groupstd import theory

  lines = workdir.read_metrics(folder / name)
  steps = {
    key: np.array([line.get(key, np.nan) for line in lines], float)
    for key in lines[0]
  }
  op = scalar.build_op(config)
  p, counts = np.unique(scalar.population(config), return_counts=True)
  # np.digitize puts a boundary into the upper bin; 1 belongs to the last.
  bins = np.arange(10)[:, None] == np.digitize(p, _BINS[1:-1])
  expected = theory.expected_update(op, p, config.group_size, config.max_draws)
  mass, error = _measure_mass(config)
  return Arm(
    name,
    steps,
    mass,
    error,
    np.asarray(theory.mass_share(expected, counts, bins)),
    _markov_chain(config, op, p, counts),
  )


def _measure_mass(
  config: Config,
) -> tuple[np.ndarray, np.ndarray]:
  """Share of the training step's own first update by bin, and its error."""

  from experiments import scalar, train

  experiment = train.build(config)
  start = np.asarray(experiment.start().params, np.float64)
  bins = np.digitize(scalar.population(config), _BINS[1:-1])
  sums = []
  for draw in range(_MASS_DRAWS):
    state = experiment.start()
    state, _ = experiment.step(state._replace(step=config.num_steps + draw))
    moved = np.asarray(state.params, np.float64) - start
    sums.append(np.bincount(bins, moved, minlength=10))
  sums = np.array(sums)  # [draws, 10]
  total = sums.sum()
  share = sums.sum(0) / total
  # The share is a ratio: its error is that of the numerator less share times
  # the denominator.
  residual = sums - share * sums.sum(1, keepdims=True)
  return share, np.sqrt(np.sum(residual**2, 0)) / total


def _markov_chain(
  config: Config, op, p: np.ndarray, counts: np.ndarray
) -> np.ndarray:
  """[S + 1]: the expected mean p of the hardest quarter, exactly.

  A prompt's θ is a Markov chain: it moves by rate·gain(k), k of the last group
  drawn. Its distribution is carried along on a grid, where a point between two
  nodes is shared so that its mean is kept.
  """
  from groupstd import theory

  grid, spacing = np.linspace(-6, 20, 2601, retstep=True)
  grid_p = 1 / (1 + np.exp(-grid))
  size, draws = config.group_size, config.max_draws
  # Until a group speaks: each mixed k is as much likelier as groups are drawn.
  chance = theory.binomial(grid_p, size)[:, 1:-1]
  chance = chance * theory.expected_draws(grid_p, size, draws)[:, None]
  chance = np.c_[chance, 1 - chance.sum(1)]
  rate = config.optimizer.sgd.learning_rate
  moves = rate * np.append(theory.gain(op, size)[1:-1], 0)

  def place(points, mass):
    at = np.clip((points - grid[0]) / spacing, 0, len(grid) - 1.001)
    left = at.astype(int)
    above = (at - left) * mass
    return np.bincount(left, mass - above, len(grid)) + np.bincount(
      left + 1, above, len(grid)
    )

  # p ascends, so the hardest quarter is the first of the counts.
  quarter = -(-config.num_prompts // 4)
  weights = np.diff(np.minimum(np.append(0, np.cumsum(counts)), quarter))
  density = place(np.log(p) - np.log1p(-p), weights / quarter)
  landing = grid[:, None] + moves
  path = [density @ grid_p]
  for _ in range(config.num_steps):
    density = place(landing.ravel(), (density[:, None] * chance).ravel())
    path.append(density @ grid_p)
  return np.array(path)


def draw(arms: list[Arm], folder: pathlib.Path) -> None:
  """dynamics.png and .pdf: four panels, measured against predicted."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
  silent, mass, by_step, by_rollouts = axes.flat
  for i, arm in enumerate(arms):
    color, label = COLORS[arm.name], ARMS[arm.name]
    silent.plot(arm.silent, ".", ms=4, color=color, alpha=0.6, label=label)
    silent.plot(arm.predicted_silent, color=color, lw=1)
    x = np.arange(10) + 0.27 * (i - 1)
    mass.bar(x, arm.mass, 0.25, color=color, alpha=0.75, label=label)
    mass.errorbar(
      x, arm.predicted_mass, xerr=0.12, fmt="none", ecolor="black", elinewidth=1
    )
    per_prompt = arm.drawn / arm.steps["first_draws"][0]
    for axis, spent in (
      (by_step, np.arange(len(arm.quarter))),
      (
        by_rollouts,
        per_prompt,
      ),
    ):
      axis.plot(spent, arm.quarter, color=color, label=label)
      axis.plot(spent, arm.predicted_quarter, ":", color="black", lw=1)
  silent.set(
    title="a  Silent groups among first draws",
    xlabel="step",
    ylabel="share (points: measured; lines: predicted)",
  )
  mass.set(
    title="b  Where the first update's mass lies",
    xlabel="success probability p at the start",
    ylabel="share of mass (bars: measured; ticks: predicted)",
    xticks=np.arange(11) - 0.5,
    xticklabels=[f"{edge:.1f}" for edge in _BINS],
  )
  by_step.set(
    title="c  The initially hardest quarter, by step",
    xlabel="step",
    ylabel="mean p (dotted: predicted)",
  )
  by_rollouts.set(
    title="d  The same by rollouts: what redrawing costs",
    xlabel="rollouts drawn per prompt",
    ylabel="mean p",
  )
  for axis in axes.flat:
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
  for suffix in "png", "pdf":
    figure.savefig(folder / f"dynamics.{suffix}", dpi=150)
  plt.close(figure)
