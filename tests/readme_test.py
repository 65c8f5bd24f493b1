"""README.md's Python runs as printed, block after block, as a reader would."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_every_python_block_runs():
  blocks = re.findall(
    r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S
  )
  assert len(blocks) >= 4
  names = {}
  for block in blocks:
    exec(compile(block, README.name, "exec"), names)  # They share names.
    if "for _ in range(100)" in block:
      assert names["state"].step == 100
      assert not names["info"].nonfinite
  assert names["state"].step == 1  # On the mesh.


def test_the_tree_names_every_file():
  """One line a file, and no file that is not there."""
  text = README.read_text()
  tree = text[text.index("## The tree") :]
  root = README.parent
  for folder in "groupstd", "experiments", "configs":
    for path in (root / folder).glob("*.py"):
      if path.name != "__init__.py":
        assert path.name in tree, path
  for name in re.findall(r"^  (\w+\.py)", tree, re.M):
    assert any(
      (root / folder / name).exists()
      for folder in ("groupstd", "experiments", "configs")
    ), name
