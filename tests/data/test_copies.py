"""Files of the same bytes."""

from vit_jax.data import copies


def test_files_are_the_same_by_all_their_bytes(tmp_path):
  end = bytes(5000)  # more than is compared first
  contents = {
    "a": b"1" + end,
    "b": b"2" + end,
    "c": b"1" + end,
    "d": b"1" + end + b"0",
    "e": b"",
    "f": b"",
    "g": b"1" + end,
    "x": b"2",
    "y": b"2",
  }
  for name, data in contents.items():
    (tmp_path / name).write_bytes(data)
  paths = [str(tmp_path / name) for name in [*contents, "missing"]]
  same = copies.find(paths)
  of = {path[-1]: first[-1] for path, first in same.items()}
  assert of == {"a": "a", "c": "a", "g": "a", "x": "x", "y": "x"}
  assert copies.find([]) == {}
