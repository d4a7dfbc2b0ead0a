"""The recipe for one's own images without labels, from start to last line."""

import methods
import pytest
import tiny
from shared_runs import folder

from vit_jax.config import cli
from vit_jax.models import build
from vit_jax.train import train_and_evaluate


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
  """Images, images with labels, and a model of 16 px without training."""
  root = tmp_path_factory.mktemp("unlabelled")
  colours = {"red": "red", "blue": "blue"}
  folder(root / "images", colours, 24)
  folder(root / "labels", colours, 20)
  config = tiny.config(model__variant="Ti/4")
  params = methods.params_of(build(config.model, tiny.NUM_CLASSES))
  methods.write(root / "init", config, params, tiny.NUM_CLASSES)
  return f"path={root}/images,init={root}/init", f"labels={root}/labels"


def _config(arguments, **changes):
  flags = [f"--config.{key}={value}" for key, value in changes.items()]
  recipe = f"--config=configs/unlabelled.py:{','.join(arguments)}"
  return cli.parse("train", {}, [recipe, *flags]).config


def test_what_follows_from_images_and_model(arguments):
  config = _config(arguments)
  assert config.objective.kind == "dinov2" and config.lora.rank  # few images
  assert config.objective.gram_model == config.init
  sizes = {k: v[-3:-1] for k, v in config.view_shapes.items()}
  assert sizes == {"global_1": (16, 16), "global_2": (16, 16), "local": (8, 8)}
  assert [e.name for e in config.evals] == ["rankme", "knn", "fewshot"]
  assert [e.name for e in _config(arguments[:1]).evals] == ["rankme"]
  with pytest.raises(SystemExit):
    _config(["init=x"])


@pytest.mark.nightly
def test_the_last_line_says_what_became_of_the_scores(
  arguments, tmp_path, capsys
):
  config = _config(
    arguments, **{"total_steps": 4, "optim.warmup_steps": 1, "log_steps": 1}
  )
  train_and_evaluate(config, str(tmp_path))
  out = capsys.readouterr()
  text = out.out + out.err
  assert "step 0: knn" in text and "step 4: rankme" in text
  line = next(x for x in text.splitlines() if x.startswith("result"))
  assert "k-NN" in line and "10 labels per class" in line and "->" in line
