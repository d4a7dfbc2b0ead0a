"""Fitting weights to a model: what is kept, resized, dropped, refused."""

import dataclasses

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapting import DATA, ROOT, SIZE, adapt, make_target, published
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.config import cli, model_config, to_dict
from vit_jax.models.stacking import stack_blocks
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy

BLOCK = "Transformer/encoderblock_1/"


def changed(params, name="vit_token_prelogits"):
  found = published(name)
  new = {k: lazy(v) for k, v in params.items()}
  return dataclasses.replace(found, params=found.params | new)


HEAD = ("head/bias", "head/kernel")
TANH = ("pre_logits/bias", "pre_logits/kernel")


@pytest.mark.parametrize(
  "source, options, reinitialised, ignored",
  [
    ("vit_token_prelogits", dict(pre_logits=True), (), ()),
    ("vit_linen_names", dict(), (), ()),
    # As the paper fine-tunes: both layers removed, a new head attached.
    ("vit_token_prelogits", dict(num_classes=3), HEAD, TANH),
    # The head was trained on what tanh gave, so it goes with it.
    ("vit_token_prelogits", dict(), HEAD, TANH),
    ("vit_linen_names", dict(pre_logits=True), HEAD + TANH, ()),
    (
      "vit_token_prelogits",
      dict(num_classes=3, pre_logits=True),
      HEAD + TANH,
      (),
    ),
  ],
)
def test_the_head_is_taken_as_a_whole_or_not(
  source, options, reinitialised, ignored
):
  found = published(source)
  params, report = adapt(found, **options)
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
    np.testing.assert_array_equal(array, found.params[path])
  assert report.loaded == {
    k: v.shape for k, v in expected.items() if k not in reinitialised
  }


def test_the_caller_keeps_its_own_where_there_is_none():
  model = model_config(**SIZE)
  target = make_target(model, num_classes=3)
  fresh = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), target)
  loaded, _ = weights.adapt(published(), fresh, model, (32, 32))
  params = jax.tree.map(
    lambda old, new: old if new is None else new, fresh, loaded
  )
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  assert not params["head"]["kernel"].any() and params["cls"].any()


def test_what_is_dropped_or_refused_is_never_read():
  def fail():
    raise AssertionError("read")

  found = published()
  for path in HEAD + TANH:
    found.params[path] = dataclasses.replace(found.params[path], read=fail)
  _, report = adapt(found, num_classes=3)
  assert report.reinitialised == HEAD
  found.params["head/kernel"] = dataclasses.replace(
    found.params["head/kernel"], shape=(48, 10**9)
  )
  _, report = adapt(found, pre_logits=True)
  assert report.reinitialised == HEAD + TANH
  for path, array in found.params.items():
    found.params[path] = dataclasses.replace(array, read=fail)
  kernel = BLOCK + "MlpBlock_0/Dense_0/kernel"
  found.params[kernel] = dataclasses.replace(
    found.params[kernel], shape=(10**9, 10**9)
  )
  del found.params[POS_EMBEDDING]  # which is resampled beforehand
  with pytest.raises(
    ValueError, match="got shape .1000000000, 1000000000., ex"
  ):
    adapt(found)


def test_loops_become_scans_and_back():
  found = published("vit_linen_names")
  loop, scan = (model_config(**SIZE, scan=s) for s in (False, True))
  as_loop, _ = weights.adapt(found, make_target(loop), loop, (32, 32))
  as_scan, report = weights.adapt(found, make_target(scan), scan, (32, 32))
  jax.tree.map(np.testing.assert_array_equal, as_scan, stack_blocks(as_loop))
  assert BLOCK + "LayerNorm_0/scale" in report.loaded


def test_our_checkpoints_state_what_they_are(tmp_path):
  model = model_config(**SIZE)
  params = foreign.random_params(model, 2, (16, 32))
  metadata = {
    "model": to_dict(model),
    "grid": [2, 4],
    "image_size": [16, 32],
    "class_names": ["cat", "ox"],
    "preprocessing": {"ops": "decode|resize((16, 32))"},
  }
  path = str(tmp_path / "step")
  checkpointer.write_params(path, unflatten_dict(params, sep="/"), metadata)
  found = weights.read(path)
  assert found.metadata == metadata
  assert (found.format, found.grid, found.image_size, found.has_cls_row) == (
    "checkpoint",
    (2, 4),
    (16, 32),
    True,
  )
  assert found.class_names == ("cat", "ox")
  assert found.ops == "decode|resize((16, 32))"
  assert found.options == dataclasses.asdict(model)
  _, report = adapt(found, (16, 32), num_classes=2)
  assert not report.resized and not report.notes
  _, report = adapt(found, num_classes=2)
  assert report.resized == {POS_EMBEDDING: ((2, 4), (4, 4))}


def test_an_unknown_grid_is_asked_for():
  table = np.zeros((1, 1 + 15, 48), "f")  # 15 patches; 16 is no excuse
  found = changed({POS_EMBEDDING: table})
  with pytest.raises(ValueError) as e:
    adapt(found, (24, 40))
  assert str(e.value).split("\n")[1] == (
    f"  - {POS_EMBEDDING}: got 15 patches (with a row for the class token),"
    " expected a square number, since the file states no grid. State it:"
    " grid=(rows, columns), and cls_row if that is wrong."
  )
  stated = dataclasses.replace(found, grid=(3, 5))
  _, report = adapt(stated, (24, 40))
  assert not report.resized
  wrong = dataclasses.replace(found, grid=(4, 5))
  with pytest.raises(ValueError, match="got 16 rows, expected 21: 4 x 5"):
    adapt(wrong, (24, 40))


def test_all_faults_are_told_at_once():
  kernel = BLOCK + "MlpBlock_0/Dense_0/kernel"
  norm = "Transformer/encoder_norm/scale"
  found = changed(
    {
      kernel: np.zeros((48, 95), "f"),
      norm: np.ones(47, "f"),
      "conv_root/kernel": np.ones((7, 7, 3, 64), "f"),
    }
  )
  del found.params["cls"]
  with pytest.raises(ValueError) as e:
    adapt(found, num_classes=3)
  assert str(e.value) == (
    "4 errors in the weights of"
    f" {DATA}/vit_token_prelogits.weights.npz for this model:\n"
    f"  - {norm}: got shape (47,), expected (48,).\n"
    f"  - {kernel}: got shape (48, 95), expected (48, 96).\n"
    "  - cls: missing, expected shape (1, 1, 48).\n"
    "  - conv_root/kernel: got shape (7, 7, 3, 64), expected no such"
    " parameter.\n"
    "The model that fits them: --config.model.variant=R+B/16"
    " --config.model.pool=gap --config.model.pre_logits=True"
  )


@pytest.mark.parametrize("path", ["Transformer/encoder_norm/scale", "cls"])
def test_what_is_not_finite_is_refused(path):
  found = published("vit_linen_names")
  bad = np.array(found.params[path], np.float32)
  bad[..., 3:6] = np.nan, np.inf, -np.inf
  with pytest.raises(ValueError) as e:
    adapt(changed({path: bad}, "vit_linen_names"))
  assert str(e.value) == (
    f"1 error in the weights of {found.path} for this model:\n"
    f"  - {path}: got 3 values that are NaN or infinite, expected none.\n"
    "The model is the right one; take other weights."
  )


@pytest.mark.parametrize(
  "source, options, message",
  [
    (
      "vit_linen_names",
      dict(pool="gap"),
      r"2 errors .*pos_embedding: got shape \(1, 17, 48\), expected \(1, 16,"
      r" 48\).*- cls: got shape \(1, 1, 48\), expected no such",
    ),
    ("bv_scan", dict(), r"cls: missing, expected shape \(1, 1, 48\)"),
    (
      "vit_linen_names",
      dict(posemb="none"),
      "^1 error in .*pos_embedding: got shape .* expected no such parameter",
    ),
    (
      "vit_linen_names",
      dict(depth=1),
      "16 errors .*encoderblock_1/LayerNorm_0/bias: got shape .* no such",
    ),
    (
      "vit_linen_names",
      dict(depth=3, scan=True),
      "16 errors .*encoderblock_2/LayerNorm_0/bias: missing",
    ),
    (
      "vit_linen_names",
      dict(width=64),
      r"got shape \(1, 17, 48\), expected \(1, 17, 64\)",
    ),
  ],
)
def test_other_models_are_told_and_the_one_that_fits_loads(
  source, options, message
):
  found = published(source)
  with pytest.raises(ValueError, match=f"(?s){message}") as e:
    adapt(found, **options)
  line = str(e.value).rsplit("\n", 1)[1]
  advice, *flags = line.split(" --")
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
  params, report = weights.adapt(found, make_target(model), model, (32, 32))
  assert params["cls" if source != "bv_scan" else "head"] is not None
  assert not (report.resized or report.reinitialised or report.ignored)


def test_weights_of_something_else_are_all_errors():
  found = weights.Weights("x", "google", {"conv/kernel": lazy(np.zeros(3))})
  with pytest.raises(ValueError) as e:
    adapt(found)
  text = str(e.value)
  assert text.startswith("39 errors in the weights of x for this model:\n")
  assert (
    "\n  - conv/kernel: got shape (3,), expected no such parameter." in text
  )
  assert "\nNo model of ours fits them: got 1 parameters, such as conv/" in text


def test_other_numerics_are_noted():
  found = dataclasses.replace(
    published("vit_linen_names"), options={"gelu": "erf", "ln_eps": 1e-12}
  )
  _, report = adapt(found)
  assert report.notes == (
    "these weights were trained with gelu=erf, the model has tanh;"
    " config.model.gelu=erf keeps it.",
    "these weights were trained with ln_eps=1e-12, the model has 1e-06;"
    " config.model.ln_eps=1e-12 keeps it.",
  )
  _, report = adapt(found, gelu="erf", ln_eps=1e-12)
  assert report.notes == ()


def test_other_norms_are_noted():
  options = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")  # timm's
  found = published("bit_v2")
  found = dataclasses.replace(found, options=found.options | options)
  model = weights.identify(found.params, {})
  target = make_target(model, (64, 64), 7)
  _, report = weights.adapt(found, target, model, (64, 64))
  assert report.notes == (
    "these weights were trained with root_pad=nothing, the model has zero;"
    " config.model.root_pad=nothing keeps it.",
    "these weights were trained with gn_eps, ws_eps, ws_eps_on = (1e-05, 1e-08,"
    " 'var'), the model has (1e-05, 1e-10, 'var').",
  )
  model = weights.identify(found.params, found.options)
  _, report = weights.adapt(found, target, model, (64, 64))
  assert report.notes == ()


def test_report():
  found = dataclasses.replace(published(), path="B_16.npz", notes=("Mind.",))
  _, report = adapt(found, (48, 48), num_classes=3)
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


@pytest.mark.parametrize(
  "old, new, is_kept",
  [
    ("abcdefghijk", "abcdefghijk", True),
    ("abcdefghijk", "xbcdefghijk", False),  # as many, but others
    ("abcdefghijk", "bacdefghijk", True),  # in another order
    (None, "abcdefghijk", True),
    ("abcdefghijk", None, True),
  ],
)
def test_the_head_of_other_classes_is_dropped(old, new, is_kept):
  found = dataclasses.replace(
    published(), class_names=tuple(old) if old else None
  )
  params, report = adapt(
    found,
    pre_logits=True,
    adapt_options=dict(class_names=tuple(new) if new else None),
  )
  assert (params["head/kernel"] is not None) == is_kept
  assert bool(report.reinitialised) != is_kept
  if is_kept:
    order = [(old or new).index(name) for name in new or old]
    for path in ("head/kernel", "head/bias"):
      array = np.asarray(found.params[path])
      np.testing.assert_array_equal(params[path], array[..., order])
  told = " ".join(report.notes)
  assert ("in the order of the data's, by name" in told) == (
    (old, new) == ("abcdefghijk", "bacdefghijk")
  )
  assert (
    "its classes are others (a, b, c, d and 7 more; those of the data: x, b, c,"
    " d and 7 more)" in told
  ) != is_kept
  assert ("no names of its own to compare" in told) == (old is None)


def test_halves_become_single_floats():
  found = published("vit_linen_names")
  for name, array in found.params.items():
    found.params[name] = array.then(
      array.shape, lambda a: a.astype(jnp.bfloat16)
    )
  params, _ = adapt(found)
  assert {a.dtype for a in params.values()} == {np.dtype(np.float32)}
