"""Uses an installed vit_jax: NEW_VENV/bin/python -I tests/check_wheel.py.

All is done in an empty folder, outside of a checkout, as by someone who has
nothing but `pip install 'vit_jax-*.whl[train]'`.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sysconfig
import tempfile

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
TINY = (
  "--config=glyphs --fake_data --workdir=run --config.total_steps=2"
  " --config.optim.warmup_steps=0 --config.data.batch_size=8"
  " --config.model.depth=1 --config.log_steps=1"
).split()


def main() -> None:
  """Raises AssertionError unless the commands and configs are there."""
  import vit_jax
  from vit_jax.config import config_files

  assert vit_jax.__version__ == importlib.metadata.version("vit_jax")
  assert vit_jax.LETTERS.is_file()
  package = pathlib.Path(vit_jax.__file__).resolve().parent
  assert package != CHECKOUT / "vit_jax"
  assert config_files.known_folder() == package / "configs", (
    config_files.known_folder()
  )
  known = {path.stem for path in (CHECKOUT / "configs").glob("*.py")}
  assert {*config_files.known()} == known
  with tempfile.TemporaryDirectory() as folder:
    use(pathlib.Path(folder))
  print(f"{package}: works")


def use(folder: pathlib.Path) -> None:
  """Runs commands in the folder."""
  scripts = pathlib.Path(sysconfig.get_path("scripts"))
  env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

  def run(*argv: str, status: int = 0) -> str:
    done = subprocess.run(
      [str(scripts / "vit-jax"), *argv],
      capture_output=True,
      text=True,
      cwd=folder,
      env=env,
    )
    output = done.stdout + done.stderr
    assert done.returncode == status, f"{argv}: {done.returncode}\n{output}"
    return output

  assert "train " in run("--help")
  text = run("train", "--config=vit_b16:imagenet21k", "--help=optim")
  assert "config.optim.lr = 0.001\n" in text
  text = run("train", "--config=vit_b61", status=1)
  assert "Did you mean 'vit_b16'?" in text
  run("train", *TINY)
  assert json.loads((folder / "run/config.json").read_text())["optim"]
  run("report", "run")
  assert (folder / "run/report.html").stat().st_size > 10_000
  run("convert", "run", "tiny.safetensors", "--to=timm")


if __name__ == "__main__":
  main()
