"""Every config: loads without a fault, equals its golden text, has a model.

After a wanted change: python tests/test_configs.py writes the golden texts.
"""

import doctest
import json
import pathlib
import sys

import jax
import pytest

from vit_jax import cli, recipes, variants
from vit_jax.config import to_dict
from vit_jax.faults import faults
from vit_jax.models import build
from vit_jax.opstring import image_size

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

# Every file, with the arguments that its recipes differ by.
ARGUMENTS = {
  **{
    f"vit_{v}": ["imagenet2012", "imagenet21k", "folder:images"]
    for v in ("b16", "b32", "l16", "l32", "h14")
  },
  "finetune": [
    "",
    "init=runs/vit_l16,model=L/16,dataset=imagenet2012,res=384",
    "init=weights.npz,model=H/14,dataset=folder:images,res=518",
    "init=runs/vit_b32,model=B/32,dataset=oxford_iiit_pet,res=384",
    "init=BiT-M-R50x1.npz,model=R50x1,dataset=cifar100,res=128",
  ],
  "comparison": [
    "",
    "model=R50+B/16,dataset=imagenet2012",
    "model=H/14,dataset=imagenet21k",
  ],
  "glyphs": [""],
  "digits_finetune": ["", "init=runs/glyphs"],
}
CASES = [(name, arg) for name, args in ARGUMENTS.items() for arg in args]


def _load(name, argument):
  colon = ":" if argument else ""
  return cli.parse("x", {}, [f"--config=configs/{name}.py{colon}{argument}"])


def _golden(name):
  """All options of a config, for each of its arguments."""
  values = {a: to_dict(_load(name, a).config) for a in ARGUMENTS[name]}
  return json.dumps(values, indent=1) + "\n"


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("module", [recipes, variants])
def test_examples_in_docstrings(module):
  failed, attempted = doctest.testmod(module)
  assert attempted and not failed


def test_every_config_is_tested():
  assert {p.stem for p in (ROOT / "configs").glob("*.py")} == set(ARGUMENTS)
  assert {p.stem for p in GOLDEN.glob("*.json")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_golden_text(name):
  assert _golden(name) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize("name, argument", CASES)
def test_loads_and_has_a_model(name, argument):
  args = _load(name, argument)
  assert args.faults + faults(args.config) == []
  size = image_size(args.config.data.ops)
  model = build(args.config.model, 10)
  images = jax.ShapeDtypeStruct((1, *size, 3), "float32")
  (logits, _), variables = jax.eval_shape(
    model.init_with_output, jax.random.key(0), images
  )
  assert logits.shape == (1, 10)
  assert variables["params"]["head"]["bias"].shape == (10,)


@pytest.mark.parametrize(
  "source, message",
  [
    ("vit_b16.py:imagnet2012", "Did you mean 'imagenet2012'?"),
    ("finetune.py:ini=x", "Did you mean 'init'?"),
    ("finetune.py:dataset=cifar11", "Did you mean 'cifar10'?"),
    ("finetune.py:res=big", "res=big"),
    ("digits_finetune.py:x", "expected init=<run>"),
    ("glyphs.py:x", "got the argument 'x', but it takes none"),
  ],
)
def test_arguments_that_are_wrong(source, message):
  with pytest.raises(SystemExit) as e:
    cli.parse("x", {}, [f"--config=configs/{source}"])
  assert f"  - --config=configs/{source}: " in str(e.value)
  assert message in str(e.value)


if __name__ == "__main__":
  sys.path.insert(0, str(ROOT))
  for config_name in ARGUMENTS:
    (GOLDEN / f"{config_name}.json").write_text(_golden(config_name))
