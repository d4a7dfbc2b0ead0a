"""Fitting weights to a model: what is loaded, dropped, refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapting import ROOT, adapt, make_target, published
from flax.traverse_util import flatten_dict
from weight_files import DATA, SIZE

from vit_jax import weights
from vit_jax.config import cli, model_config, to_dict
from vit_jax.models.stacking import stack_blocks
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy

BLOCK = "Transformer/encoderblock_1/"
HEAD = ("head/bias", "head/kernel")
TANH = ("pre_logits/bias", "pre_logits/kernel")


def changed(params, name="vit_token_prelogits"):
  file = published(name)
  new = {k: lazy(v) for k, v in params.items()}
  return dataclasses.replace(file, params=file.params | new)


def test_a_pooled_vector_has_a_norm_of_its_own():
  """MAE's fine-tuning drops the norm of the tokens."""
  file = published("vit_linen_names")
  options = dict(name="modern", pool="gap", final_norm="pooled")
  params, report = adapt(file, **options)
  assert report.reinitialised == ("pooled_norm/bias", "pooled_norm/scale")
  assert report.ignored == (
    "Transformer/encoder_norm/bias",
    "Transformer/encoder_norm/scale",
  )
  assert any("norm of the pooled vector" in note for note in report.notes)
  assert params["pooled_norm/scale"] is None
  assert not any("encoder_norm" in path for path in params)
  np.testing.assert_array_equal(params["cls"], file.params["cls"])


def test_a_regression_drops_the_head_alone():
  """The name of BiT's last norm ends with "head", too."""
  file = changed({"head_dist/bias": np.zeros(7, "f")}, "bit_v2")
  left = weights.without_head(file, model_config())
  assert file.params.keys() - left.params.keys() == {*HEAD, "head_dist/bias"}
  assert left.notes[-1].startswith("the head is not loaded: a regression")


@pytest.mark.parametrize(
  "source, options, reinitialised, ignored",
  [
    ("vit_token_prelogits", dict(pre_logits=True), (), ()),
    # As the paper fine-tunes: both layers removed, a new head attached.
    ("vit_token_prelogits", dict(num_classes=3), HEAD, TANH),
    # The head was trained on what tanh gave, so it goes with it.
    ("vit_token_prelogits", dict(), HEAD, TANH),
    ("vit_linen_names", dict(pre_logits=True), HEAD + TANH, ()),
  ],
)
def test_the_head_is_loaded_as_a_whole_or_not(
  source, options, reinitialised, ignored
):
  file = published(source)
  params, report = adapt(file, **options)
  assert report.reinitialised == reinitialised
  assert report.ignored == ignored
  num_classes = options.pop("num_classes", 11)
  model = model_config(**SIZE | options)
  expected = flatten_dict(make_target(model, num_classes=num_classes), sep="/")
  assert params.keys() == expected.keys()
  for path, array in params.items():
    if path in reinitialised:
      assert array is None
      continue
    assert array.dtype == np.float32 and array.shape == expected[path].shape
    np.testing.assert_array_equal(array, file.params[path])
  assert report.loaded == {
    k: v.shape for k, v in expected.items() if k not in reinitialised
  }


def test_what_is_dropped_or_refused_is_never_read():
  def fail():
    raise AssertionError("read")

  file = published()
  for path in HEAD + TANH:
    file.params[path] = dataclasses.replace(file.params[path], read=fail)
  _, report = adapt(file, num_classes=3)
  assert report.reinitialised == HEAD
  kernel = BLOCK + "MlpBlock_0/Dense_0/kernel"
  for path, array in file.params.items():
    file.params[path] = dataclasses.replace(array, read=fail)
  file.params[kernel] = dataclasses.replace(
    file.params[kernel], shape=(10**9, 10**9)
  )
  del file.params[POS_EMBEDDING]  # which is resampled beforehand
  with pytest.raises(
    ValueError, match="got shape .1000000000, 1000000000., ex"
  ):
    adapt(file)


def test_loops_become_scans_and_back():
  file = published("vit_linen_names")
  loop, scan = (model_config(**SIZE, scan=s) for s in (False, True))
  as_loop, _ = weights.adapt(file, make_target(loop), loop, (32, 32))
  as_scan, report = weights.adapt(file, make_target(scan), scan, (32, 32))
  jax.tree.map(
    np.testing.assert_array_equal,
    as_scan,
    stack_blocks(as_loop, model_config()),
  )
  assert BLOCK + "LayerNorm_0/scale" in report.loaded


def test_all_errors_come_at_once():
  kernel = BLOCK + "MlpBlock_0/Dense_0/kernel"
  norm = "Transformer/encoder_norm/scale"
  file = changed(
    {
      kernel: np.zeros((48, 95), "f"),
      norm: np.ones(47, "f"),
      "conv_root/kernel": np.ones((7, 7, 3, 64), "f"),
    }
  )
  del file.params["cls"]
  with pytest.raises(ValueError) as e:
    adapt(file, num_classes=3)
  text = str(e.value)
  assert f"{DATA}/vit_token_prelogits.weights.npz" in text
  for part in (
    f"- {norm}: got shape (47,), expected (48,)",
    f"- {kernel}: got shape (48, 95), expected (48, 96)",
    "- cls: missing, expected (1, 1, 48)",
    "- conv_root/kernel: got shape (7, 7, 3, 64)",
  ):
    assert part in text


@pytest.mark.parametrize(
  "source, options, message",
  [
    (
      "vit_linen_names",
      dict(pool="gap"),
      "pos_embedding: got shape .*- cls: got shape",
    ),
    ("vit_linen_names", dict(posemb="none"), "pos_embedding: got shape"),
    (
      "vit_linen_names",
      dict(depth=3, scan=True),
      "encoderblock_2/LayerNorm_0/bias: missing",
    ),
  ],
)
def test_the_model_that_fits_is_named_and_loads(source, options, message):
  file = published(source)
  with pytest.raises(ValueError, match=f"(?s){message}") as e:
    adapt(file, **options)
  advice, *flags = str(e.value).rsplit("\n", 1)[1].split(" --")
  assert advice == "The model that fits them:"
  # The config that was refused, and then these flags.
  wrong = to_dict(model_config(**SIZE | options)).items()
  flags = [f"config.model.{k}={v}" for k, v in wrong] + flags
  args = cli.parse(
    "train",
    {},
    [f"--config={ROOT}/configs/glyphs.py", *(f"--{flag}" for flag in flags)],
  )
  assert not args.errors
  model = args.config.model
  _, report = weights.adapt(file, make_target(model), model, (32, 32))
  assert not (report.resized or report.reinitialised or report.ignored)


def test_report():
  file = dataclasses.replace(published(), path="B_16.npz", notes=("Mind.",))
  _, report = adapt(file, (48, 48), num_classes=3)
  # 9,264 of the stem, 48 of cls, 37 * 48 positions, 2 * 18,960 of the blocks,
  # 96 of the last norm.
  assert weights.format_report(report) == (
    "weights         B_16.npz\n"
    "loaded          38 arrays, 49,104 parameters\n"
    f"resized         {POS_EMBEDDING}: 4x4 -> 6x6\n"
    "re-initialised  head/bias, head/kernel\n"
    "ignored         pre_logits/bias, pre_logits/kernel\n"
    "note            Mind."
  )


def test_halves_become_single_floats():
  file = published("vit_linen_names")
  for name, array in file.params.items():
    file.params[name] = array.then(
      array.shape, lambda a: a.astype(jnp.bfloat16)
    )
  params, _ = adapt(file)
  assert {a.dtype for a in params.values()} == {np.dtype(np.float32)}


NUMBERS = ["0", "1", "10", *"23456789"]  # as folders are sorted


@pytest.mark.parametrize(
  "old, new, order, note",
  [
    ("abcdefghijk", "abcdefghijk", range(11), None),
    # As many, but others.
    ("abcdefghijk", "xbcdefghijk", None, "the head is not loaded"),
    ("abcdefghijk", "bacdefghijk", [1, 0, *range(2, 11)], "order, by name"),
    (None, "abcdefghijk", range(11), "number of classes"),
    ("abcdefghijk", None, range(11), None),
    (None, NUMBERS, [0, 1, 10, *range(2, 10)], "order, by number"),
  ],
)
def test_columns_of_the_head_are_those_of_the_data_s_classes(
  old, new, order, note
):
  """`order`: numbers of the columns that are taken; None: a new head."""
  file = dataclasses.replace(
    published(), class_names=tuple(old) if old else None
  )
  options = dict(class_names=tuple(new) if new else None)
  params, report = adapt(file, pre_logits=True, adapt_options=options)
  assert bool(report.notes) == bool(note)
  assert not note or note in report.notes[-1]
  assert report.reinitialised == (HEAD + TANH if order is None else ())
  for path in HEAD if order else ():
    array = np.asarray(file.params[path])
    np.testing.assert_array_equal(params[path], array[..., [*order]])


def test_other_numerics_are_noted():
  file = published("vit_linen_names")
  file = dataclasses.replace(file, options={"gelu": "erf", "ln_eps": 1e-12})
  _, report = adapt(file)
  gelu, eps = report.notes
  assert "gelu=erf" in gelu and "tanh" in gelu
  assert "ln_eps=1e-12" in eps and "1e-06" in eps
  _, report = adapt(file, **file.options)
  assert not report.notes
