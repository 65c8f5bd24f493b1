"""How far training on one batch leaves the identity after its first step.

  python -m experiments.residual --workdir=runs/residual

The update (1/G)ΣA_i s_i = σ²·w·(s̄₊ − s̄₋) (arXiv:2607.00152, Theorem 1) is that
of a first step, on answers of the policy itself. Here one batch is stepped on
again and again, and each gradient, of the learner's own step, is held against
σ²·w·(s̄₊ − s̄₋) of the same answers at the same parameters: the residual, over
(1/G)Σ|A_i|‖s_i‖. It writes residual.png and residual.json, prints a table and
exits with 1 if a bound fails or a first step has a residual.

The bound. Token t of answer i has the score s_it (s_i = Σ_t s_it) and the ratio
r_it = π/π_behaviour, and π_ref is the policy that drew the batch. The gradient
of every loss here is, with ε_it = 1 − π_ref/π = 1 − 1/r_it for the KL's k₃,

  g = (1/G)Σ_i Σ_t n_i(A_i ρ_it − β ε_it) s_it,

where ρ is 1 for −A·log π, r for the ratio, and for the clipped ratio r where no
clip binds and 0 where one does; n_i is 1, or 1/|y_i| under length
normalisation. The identity is (1/G)Σ_i Σ_t n'_i A_i s_it, and n' = n if it is
taken in the loss's own scores n_i s_i. Subtract, and take norms:

  ‖residual‖ ≤ max|n ρ/n' − 1|·(1/G)ΣΣ n'|A|‖s_it‖ + β max|ε|·(1/G)ΣΣ n‖s_it‖.

So it is 0 at the first step, where r = 1, unless n' ≠ n; −A·log π keeps it 0;
for the ratio it is at most max|r − 1|·(1/G)ΣΣ|A|‖s_it‖, the scale itself if
answers have one token. A clip that binds counts as |0 − 1|: what it takes away.
Nothing of this asks for small steps or for a kind of policy.

What length normalisation breaks at the first step itself is `lengths`' matter;
the third panel shows it.

Hardware: one CPU core. Time: 15 s.
"""

import json
import pathlib
import sys
from typing import Any, NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, lengths
from groupstd import losses, policies, rollouts, sigma, tasks, testing, theory

# Bounds that no ratio here reaches.
_NO_CLIP = (1 - 1e-9, 1e9)
# What double precision may leave of a residual that is 0, over its scale.
_ROUNDING = 1e-12


class Arm(NamedTuple):
  """A loss, and the scores in which the identity is held against it.

  Attributes:
    name: for the table.
    clip: (low, high) of the clipped ratio; None for −A·log π.
    kl_coef: β, to the policy that drew the batch.
    per_length: whether an answer's tokens are averaged, not summed.
    in_own_scores: whether the identity weighs tokens as the loss does. If not,
      all answers get the batch's mean weight: what is left is no mere rate.
  """

  name: str
  clip: tuple[float, float] | None = None
  kl_coef: float = 0.0
  per_length: bool = False
  in_own_scores: bool = True


ARMS = (
  Arm("−A·log π"),
  Arm("ratio", _NO_CLIP),
  Arm("clipped ratio", (0.2, 0.2)),
  Arm("clipped ratio, KL", (0.2, 0.2), kl_coef=0.2),
  Arm("clipped, per length, in s/|y|", (0.2, 0.2), per_length=True),
  Arm("clipped, per length, in s", (0.2, 0.2), 0.0, True, False),
)


class Curve(NamedTuple):
  """By update and group, [S, B]: norms, none divided by another."""

  residual: np.ndarray
  bound: np.ndarray
  scale: np.ndarray

  def relative(self) -> tuple[np.ndarray, np.ndarray]:
    """[S] residual and bound over the scale, each summed over the batch."""
    total = self.scale.sum(1)
    return self.residual.sum(1) / total, self.bound.sum(1) / total


def main(argv):
  del argv
  folder = pathlib.Path(cli.require(_WORKDIR))
  folder.mkdir(parents=True, exist_ok=True)
  with jax.enable_x64(True):
    curves = {
      name: {
        arm.name: measure(policy, params, rollout, arm, _STEPS.value)
        for arm in arms
      }
      for name, (policy, params, rollout, arms) in problems().items()
    }
    sweep = lengths.sweep()
  if not show(curves, sweep, folder):
    sys.exit(1)


# -----------------------------------------------------------------------------
# Measured
# -----------------------------------------------------------------------------


def problems(
  num_prompts: int = 256, group_size: int = 8, seed: int = 0
) -> dict[str, tuple]:
  """By name: the policy, its parameters, a batch of theirs, and arms."""

  def reward(prompts, tokens, mask):
    del prompts, mask
    return lengths.last_is_one(tokens) * 1.0, jnp.ones(tokens.shape[:2], bool)

  task = tasks.bernoulli(num_prompts)._replace(reward=reward)
  start = np.linspace(0.05, 0.95, num_prompts)
  found = {}
  for name, policy, arms in (
    (
      "softmax, answers of 1 or 3 tokens",
      lengths.one_or_three(num_prompts),
      ARMS,
    ),
    # An answer of one token is averaged as it is.
    ("Bernoulli", policies.bernoulli(start), ARMS[:4]),
  ):
    params = policy.init(jax.random.key(seed))
    collect = rollouts.collector(
      policy, task, num_groups=num_prompts, group_size=group_size, seed=seed
    )
    found[name] = policy, params, collect(params, 0)[0], arms
  return found


def measure(
  policy: policies.Policy,
  params: Any,
  rollout: rollouts.Rollout,
  arm: Arm,
  num_steps: int,
  rate: float = 0.2,
) -> Curve:
  """Steps on one batch `num_steps` times by GRPO, and measures before each.

  Args:
    policy: with prompts 0, …, B − 1, and parameters [B, ...] of their own.
    params: the parameters that drew the batch.
    rollout: a group of every prompt, 0/1 rewards.
    arm: the loss.
    num_steps: S.
    rate: of plain gradient ascent, on each prompt's own update.
  """
  batch, group_size = rollout.where.shape
  rule, mask = sigma.rule(sigma.grpo()), jnp.asarray(rollout.mask)
  advantages, _ = rule(rollout.rewards, rollout.where, rollout.scores)
  gain = jnp.asarray(theory.gain(sigma.grpo(), group_size))
  right = rollout.rewards > 0
  k = jnp.sum(right, axis=1)
  contrast = (
    right / jnp.maximum(k, 1)[:, None]
    - ~right / jnp.maximum(group_size - k, 1)[:, None]
  )  # [B, G]: Σ_i contrast_i s_i = s̄₊ − s̄₋.
  weight = jnp.ones(right.shape)  # n [B, G]
  if arm.per_length:
    weight = 1 / jnp.sum(mask, axis=-1)
  own = weight if arm.in_own_scores else jnp.full_like(weight, weight.mean())
  surrogate, (low, high) = losses.reinforce(), _NO_CLIP
  if arm.clip is not None:
    low, high = arm.clip
    surrogate = losses.clipped(low, high)

  def token_scores(row, tokens):  # [G, T, D], of one prompt.
    def log_prob(row):
      one = jnp.zeros([1], int)
      return policy.log_prob(row[None], one, tokens[None])[0]

    scores = jax.jacrev(log_prob)(row)
    return scores.reshape(*tokens.shape, -1)

  def step(now, _):
    gradient = testing.gradient(
      policy,
      rule,
      now,
      rollout,
      surrogate=surrogate,
      aggregate=(
        losses.sequence_mean() if arm.per_length else losses.group_sum(batch)
      ),
      kl_coef=arm.kl_coef,
      reference=params,
    )
    update = -batch * gradient  # Of each prompt, (1/G)Σ….
    scores = jax.vmap(token_scores)(now, rollout.tokens)
    scores = jnp.where(mask[..., None], scores, 0)
    identity = gain[k][:, None] * jnp.einsum(
      "bg,bg,bgtd->bd", contrast, own, scores
    )
    residual = update.reshape(batch, -1) - identity
    log_probs = policy.log_prob(now, rollout.prompts, rollout.tokens)
    ratio = jnp.exp(jnp.where(mask, log_probs - rollout.log_probs, 0))
    held = jnp.where(
      advantages[..., None] > 0, ratio > 1 + high, ratio < 1 - low
    )
    rho = jnp.where(held, 0, ratio) if arm.clip is not None else 1.0
    away = jnp.abs(rho * (weight / own)[..., None] - 1)
    drift = jnp.where(mask, jnp.abs(1 - 1 / ratio), 0)
    # [B, G] each: of tokens, added up, and of the whole answer.
    by_token = jnp.sum(jnp.linalg.norm(scores, axis=-1), axis=-1)
    whole = jnp.linalg.norm(jnp.sum(scores, axis=2), axis=-1)
    size = own * jnp.abs(advantages)
    bound = jnp.max(jnp.where(mask, away, 0), axis=(1, 2)) * jnp.mean(
      size * by_token, axis=1
    ) + arm.kl_coef * jnp.max(drift, axis=(1, 2)) * jnp.mean(
      weight * by_token, axis=1
    )
    scale = jnp.mean(size * whole, axis=1)
    norm = jnp.linalg.norm(residual, axis=-1)
    return now + rate * update, (norm, bound, scale)

  scan = jax.jit(lambda start: jax.lax.scan(step, start, None, num_steps))
  return Curve(*(np.asarray(x) for x in scan(params)[1]))


# -----------------------------------------------------------------------------
# Shown
# -----------------------------------------------------------------------------


def show(
  curves: dict[str, dict[str, Curve]],
  sweep: dict[str, list[float]],
  folder: pathlib.Path,
) -> bool:
  """Table, figure and data, and whether all bounds and first steps hold."""
  holds = _print(curves)
  _write(curves, sweep, folder)
  _draw(curves, sweep, folder)
  print(f"Figure: {folder / 'residual.png'}; data: {folder / 'residual.json'}")
  return holds


def _print(curves: dict[str, dict[str, Curve]]) -> bool:
  from rich.console import Console
  from rich.table import Table

  last = len(next(iter(next(iter(curves.values())).values())).residual)
  shown = sorted({u for u in (1, 2, 5, 10, 20) if u < last} | {last})
  table = Table(title="Residual over (1/G)Σ|A|‖s‖, by update on one batch")
  table.add_column("policy and loss")
  for update in shown:
    table.add_column(str(update), justify="right")
  table.add_column("of the bound", justify="right")
  table.add_column("verdict")
  verdicts = []
  for name, arms in curves.items():
    table.add_section()
    table.add_row(name)
    for arm in ARMS:
      if arm.name not in arms:
        continue
      curve = arms[arm.name]
      residual, bound = curve.relative()
      slack = _ROUNDING * curve.scale.max()
      holds = bool(np.all(curve.residual <= curve.bound + slack))
      if arm.in_own_scores:
        holds &= bool(np.all(curve.residual[0] <= slack))
      verdicts.append(holds)
      share = np.max(residual / np.maximum(bound, _ROUNDING))
      table.add_row(
        f"  {arm.name}",
        *(f"{_digits(residual[update - 1])}" for update in shown),
        f"{100 * share:.0f} %" if bound.max() > _ROUNDING else "–",
        "[green]holds[/]" if holds else "[red]fails[/]",
      )
  console = Console()
  console = console if console.is_terminal else Console(width=120)
  console.print(table)
  return all(verdicts)


def _digits(value: float) -> str:
  return "0" if value < _ROUNDING else f"{value:.3g}"


def _write(curves, sweep, folder: pathlib.Path) -> None:
  """residual.json: all that the table and the figure show."""
  content: dict[str, Any] = {"length": sweep, "curves": {}}
  for name, arms in curves.items():
    relative = {arm: curve.relative() for arm, curve in arms.items()}
    content["curves"][name] = {
      arm: {"residual": residual.tolist(), "bound": bound.tolist()}
      for arm, (residual, bound) in relative.items()
    }
  text = json.dumps(content, indent=1, ensure_ascii=False)
  (folder / "residual.json").write_text(text + "\n", encoding="utf-8")


def _draw(curves, sweep, folder: pathlib.Path) -> None:
  """residual.png: the curves with their bounds, and what length breaks."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
  colors = {arm.name: f"C{i}" for i, arm in enumerate(ARMS)}
  for letter, axis, name in zip("ab", axes[:2], curves, strict=True):
    for arm, curve in curves[name].items():
      residual, bound = curve.relative()
      updates = np.arange(1, len(residual) + 1)
      axis.plot(updates, residual, color=colors[arm], label=arm)
      axis.plot(updates, bound, ":", color=colors[arm], lw=1)
    axis.set(
      title=f"{letter}  {name}",
      xlabel="update on one batch",
      ylabel="residual over (1/G)Σ|A|‖s‖ (dotted: bound)",
      ylim=(-0.05, 2.0),
    )
    axis.legend(frameon=False, fontsize=8)
  axis = axes[2]
  x = sweep["coupling"]
  axis.plot(x, sweep["size"], color="#1f6fb4", label="norm")
  axis.plot(x, sweep["along"], color="#d9822b", label="component along ∇p")
  axis.axhline(0, color="black", lw=0.5)
  axis.legend(frameon=False)
  axis.set(
    title="c  What length normalisation breaks",
    xlabel="P(right | short) − P(right | long)",
    ylabel="∇Cov(R, 1/|y|) over E[1/|y|]∇p",
  )
  for axis in axes:
    axis.spines[["top", "right"]].set_visible(False)
  figure.savefig(folder / "residual.png", dpi=150)
  plt.close(figure)


if __name__ == "__main__":
  # Only here: other experiments, too, have a flag of this name.
  _WORKDIR = flags.DEFINE_string("workdir", None, "Where the results go.")
  _STEPS = flags.DEFINE_integer(
    "steps", 40, "Updates on the one batch.", lower_bound=1
  )
  cli.run(main)
