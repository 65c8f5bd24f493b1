"""arXiv:2607.00152, regenerated: what is compared, and that it can differ.

Sampled numbers are bound by four standard errors each, at fixed seeds: with
about 200 comparisons a right program fails at 1% of seeds; one whose update is
off by six standard errors (0.5% of it at p = 0.5) passes at 2%.
"""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from scipy import special

from experiments import computed, controlled, published, sampled
from groupstd import data, sigma

ROOT = pathlib.Path(__file__).parent.parent
SECTIONS = {
  "identity": sampled.identity,
  "fidelity": computed.fidelity,
  "silent": sampled.silent,
  "objectives": sampled.objectives,
  "weight": sampled.weight,
  "big_math": computed.big_math,
  "dapo_curve": computed.dapo_curve,
}


def differing(section: str) -> list[str]:
  rows = published.rows(section, SECTIONS[section]().numbers)
  return [row.quantity for row in rows if not row.agrees]


@pytest.fixture
def replace_op(monkeypatch):
  """Trains by another operation in the place of a method's."""

  def replace(name, op):
    monkeypatch.setitem(computed.OPS, name, op)
    sampled._sample.cache_clear()

  yield replace
  monkeypatch.undo()
  sampled._sample.cache_clear()


# -----------------------------------------------------------------------------
# The comparison
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("printed", "ours", "agrees"),
  [
    ("0.92", [0.9151], True),  # What rounds to 0.92.
    ("0.92", [0.9249], True),
    ("0.92", [0.9252], False),
    ("0.5390", [0.53904], True),  # The last zero counts.
    ("0.5390", [0.5391], False),
    ("17", [16.5], True),
    ("17", [16.4], False),
    ("0.88 ± 0.03", [0.852], True),
    ("0.88 ± 0.03", [0.849], False),
    ("7, 11, 51 ± 0", [7, 11, 51], True),
    ("7, 11, 51 ± 0", [7, 11, 52], False),
    ("-2 ± 0.05", [-2.04], True),
    ("0 ± 1e-12", [2e-12], False),
    ("0 ± 4", [np.nan], False),
    ("13.9, 24.7", [24.7, 13.9], False),
  ],
)
def test_ours_agrees_within_half_a_unit_of_the_last_digit(
  printed, ours, agrees
):
  row = published.Row("source", "quantity", printed, np.array(ours))
  assert row.agrees == agrees


def test_a_quantity_is_neither_forgotten_nor_made_up():
  numbers = computed.dapo_curve().numbers
  with pytest.raises(KeyError, match="T at the end"):
    published.rows(
      "dapo_curve", {k: v for k, v in numbers.items() if "T at" not in k}
    )
  with pytest.raises(KeyError, match="made up"):
    published.rows("dapo_curve", numbers | {"made up": 1.0})
  with pytest.raises(ValueError, match="must be 1 numbers, got 2"):
    published.rows("dapo_curve", numbers | {"T at the end": [51.1, 51.1]})


# -----------------------------------------------------------------------------
# The sections
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_every_published_number_is_reproduced(section):
  assert not differing(section)


def test_the_identity_tells_operations_apart(replace_op):
  """Leaving one out is not centring; nor may a weight look at the mean."""
  replace_op("dr_grpo", sigma.rloo())
  # 1/σ for 0/1 rewards, whose mean is at most 1.
  replace_op(
    "grpo", lambda stats: sigma.Weight(1 / (stats.std + (stats.mean > 1)))
  )
  assert differing("identity") == [
    "GRPO: the same, 3 added to every reward",
    "Dr. GRPO: update − σ²Δs, relative",
    "RLOO: A − (R − b); R − μ − (G−1)/G·(R − b)",
  ]


def test_sampled_updates_tell_methods_apart(replace_op):
  """An update 3% too large is seen, although every silent group is right."""
  replace_op("dr_grpo", lambda stats: sigma.Weight(1.03 + 0 * stats.std))
  sampled_p, monte_carlo = sampled.SAMPLED_P, sampled._sample("dr_grpo", 8)[0]
  slope = sampled_p * (1 - sampled_p) * 7 / 8
  error = monte_carlo.std(1) / np.sqrt(monte_carlo.shape[1])
  assert np.abs((monte_carlo.mean(1) - slope) / error).max() > 8
  assert not differing("silent")


def test_redrawing_multiplies_the_weight_by_the_draws():
  """Redrawn up to N draws, the weight at the ends is N√(G − 1)."""
  shown = computed.Result(*sampled.weight()).shown
  ends = [0, -1]
  for name, draws in ("grpo", 1), ("dapo", 4):
    cap = draws * np.sqrt(7)
    # At p = 0.001 the weight is within 3% of the cap.
    allowed = 4 * shown[name, "error"][ends] + 0.03 * cap
    assert np.all(np.abs(shown[name, "sampled"][ends] - cap) < allowed)


def test_what_is_drawn_from_the_log_is_counted_by_combinations():
  """C(k, G) + C(64 − k, G) of C(64, G) groups are silent, for each problem."""
  correct, problems = data.big_math()
  share = problems / problems.sum()
  drawn = computed.big_math().shown["drawn"]
  for size, value in zip(computed.SILENT_SIZES, drawn, strict=True):
    silent = special.comb(correct, size) + special.comb(64 - correct, size)
    assert value == pytest.approx(share @ silent / special.comb(64, size))


def test_the_sharpened_curve_starts_and_ends_where_it_is_told():
  """E[p³²] at first, and the mean of DAPO's last eight points in the end."""
  correct, problems = data.big_math()
  curve = computed.dapo_curve().shown["curves"][0]
  start = (correct / 64) ** 32 @ problems / problems.sum()
  assert curve[0] == pytest.approx(start)
  assert curve[-1] == pytest.approx(data.dapo().all_correct_share[-8:].mean())


def test_the_timescale_is_the_best():
  """No timescale around it leaves a smaller residual."""
  result = computed.dapo_curve()
  best, shown = result.numbers["τ, in steps"], result.shown
  correct, problems = data.big_math()
  elapsed = shown["step"] - shown["step"][0]

  def residual(tau):
    progress = 1 - np.exp(-elapsed / tau)
    sharpening = 1 + progress / progress[-1] * (
      result.numbers["T at the end"] - 1
    )
    powers = (correct / 64) ** (32 / sharpening[:, None])
    return np.sum((shown["measured"] - powers @ problems / problems.sum()) ** 2)

  assert residual(best) < min(residual(0.98 * best), residual(1.02 * best))


def _arm(name, quarter, drawn=1.0):
  steps = len(quarter)
  silent = np.linspace(0.3, 0.9, steps)
  return controlled.Arm(
    name=name,
    steps={
      "first_silent": silent,
      "first_draws": np.ones(steps),
      "predicted_silent": silent,
      "predicted_silent_variance": np.zeros(steps),
      "predicted_draws": np.full(steps, drawn),
      "hardest_quarter_p": np.array(quarter),
      "drawn": np.full(steps, drawn),
      "dropped": np.full(steps, drawn - 1),
    },
    mass=np.full(10, 0.1),
    mass_error=np.zeros(10),
    predicted_mass=np.full(10, 0.1),
    predicted_quarter=np.array(quarter),
  )


@pytest.mark.parametrize(
  ("dapo", "place"),
  [
    ([0.1, 0.9, 0.9, 0.99], 1),
    ([0.1, 0.5, 0.9, 0.99], 2),  # As soon as GRPO is not faster.
    ([0.1, 0.2, 0.3, 0.4], 3),  # Never there.
  ],
)
def test_the_fastest_is_the_first_there(dapo, place):
  arms = [
    _arm("grpo", [0.1, 0.5, 0.9, 0.99]),
    _arm("dr_grpo", [0.1, 0.2, 0.7, 0.88]),
    _arm("dapo", dapo, drawn=3.5),
  ]
  rows = published.rows("controlled", computed.controlled(arms).numbers)
  ours = {row.quantity: row.ours for row in rows}
  assert ours["hardest quarter, steps to p = 0.8: DAPO's place"] == place
  assert ours["rollouts drawn per rollout used: DAPO"] == 3.5
  assert ours["hardest quarter's p at the end: Dr. GRPO"] == 0.88
  # Two of ten equal bins.
  np.testing.assert_allclose(
    ours["% of mass at p < 0.1 or > 0.9: GRPO, Dr. GRPO"], 20
  )


# -----------------------------------------------------------------------------
# The command
# -----------------------------------------------------------------------------

# Nothing is trained, and one section is left; what is printed may be changed.
COMMAND = """
import sys
from experiments import cli, controlled, paper, published
controlled.ARMS.clear()
paper._SECTIONS = {"dapo_curve": paper._SECTIONS["dapo_curve"]}
if "--change" in sys.argv:
  sys.argv.remove("--change")
  table = published.PUBLISHED["dapo_curve"]["DAPO's all-correct share"]
  table["R², one free timescale"] = "0.95"
cli.run(paper.main)
"""


def run(*arguments):
  return subprocess.run(
    [sys.executable, "-c", COMMAND, *arguments],
    cwd=ROOT,
    text=True,
    capture_output=True,
    timeout=300,
  )


def test_the_command_reports_and_fails_where_a_number_differs(tmp_path):
  for change, code, verdict in (
    ([], 0, "All 4 numbers of 4 quantities agree."),
    (["--change"], 1, "1 of 4 quantities differ: R², one free timescale"),
  ):
    ended = run(f"--workdir={tmp_path}", *change)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert verdict in ended.stdout
    report = (tmp_path / "report.md").read_text()
    assert verdict in report
    assert "consistency check and not a proof" in report.replace("\n", " ")
    assert ("DIFFERS" in report) == bool(change)
    assert "![DAPO's log](dapo_curve.png)" in report
  for name, magic in ("png", b"\x89PNG"), ("pdf", b"%PDF"):
    assert (tmp_path / f"dapo_curve.{name}").read_bytes().startswith(magic)


def test_a_mistake_in_the_command_is_told_in_a_line():
  ended = run()
  assert ended.returncode == 2
  assert ended.stderr.startswith("error: --workdir is missing")


def test_jax_is_as_it_was():
  """Double precision stays where it was asked for."""
  assert jax.numpy.zeros(1).dtype == np.float32
