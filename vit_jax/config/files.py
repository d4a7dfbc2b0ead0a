"""Config files, by path or by name: `configs/mine.py:x=1`, `vit_b16:x=1`."""

import pathlib

from vit_jax.options import nearest

_PACKAGE = pathlib.Path(__file__).parents[1]


def known_folder() -> pathlib.Path:
  """Returns the folder of the project's own config files.

  It is `configs/` of the repository, which a wheel holds inside the package.
  """
  installed = _PACKAGE / "configs"
  return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def known() -> tuple[str, ...]:
  """Returns the names of the project's own configs, such as "vit_b16"."""
  return tuple(sorted(path.stem for path in known_folder().glob("*.py")))


def split(source: str) -> tuple[str, str]:
  """Splits what --config says into file or name, and argument.

  Args:
    source: "vit_b16", "vit_b16:imagenet21k" or "configs/a.py:x=gs://b". Of a
      path, a folder's name may have a colon.

  Returns:
    What stands before the colon, and what behind it ("" without one).
  """
  head, _, argument = source.partition(":")
  if "/" not in head or ".py" not in source:
    return head, argument
  stem, ending, argument = source.partition(".py:")
  return (stem + ".py", argument) if ending else (source, "")


def find(file: str) -> pathlib.Path:
  """Returns the path of a config file.

  Args:
    file: A path; or a name, with or without .py, which is searched for in the
      current folder, in its `configs/`, and among the project's own, which
      `configs/<name>.py` names, too, where the current folder has no such file.

  Raises:
    ValueError: There is none; the message has the nearest name.
  """
  path = pathlib.Path(file)
  path = path if path.suffix == ".py" else path.parent / f"{path.name}.py"
  places, what = [path], "no Python file"
  if path.parent == pathlib.Path():
    places.append("configs" / path)
  if path.parent in (pathlib.Path(), pathlib.Path("configs")):
    places.append(known_folder() / path.name)
    what = "neither a Python file nor the name of a config"
  for place in places:
    if place.is_file():
      return place
  names = [p.name for p in path.parent.glob("*.py")]
  names += known() if len(places) > 1 else ()
  near = nearest(pathlib.Path(file).name, names)
  listed = f" Those of the project: {', '.join(known())}."
  raise ValueError(f"--config: got {file!r}, which is {what}.{near or listed}")
