"""Fitting weights to a model: what is loaded, resized, dropped, refused."""

import dataclasses
import functools
import pathlib

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from weight_files import DATA, SIZE

from vit_jax import weights
from vit_jax.config import cli, model_config, to_dict
from vit_jax.models.posemb import sincos2d
from vit_jax.models.resample import resample_patch_kernel, resample_posemb
from vit_jax.models.stacking import stack_blocks
from vit_jax.weights.weights_file import POS_EMBEDDING, lazy

GLYPHS = pathlib.Path(__file__).parents[2] / "configs" / "glyphs.py"
BLOCK = "Transformer/encoderblock_1/"
DENSE = BLOCK + "MlpBlock_0/Dense_0/kernel"
HEAD = ("head/bias", "head/kernel")
TANH = ("pre_logits/bias", "pre_logits/kernel")
# Files with a class token on a grid of 4 x 4, 2 blocks, 11 classes.
WITH_TANH, PLAIN = "vit_token_prelogits", "vit_linen_names"


@functools.cache
def make_target(model, image=(32, 32), num_classes=11):
  shapes = foreign.shapes(model, num_classes, tuple(image))
  structs = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
  return unflatten_dict(structs, sep="/")


def published(name=PLAIN, **changes):
  """A published file with other arrays in it."""
  file = weights.read(DATA / f"{name}.weights.npz")
  new = {k.replace("__", "/"): lazy(v) for k, v in changes.items()}
  return dataclasses.replace(file, params=file.params | new)


def random_weights(model, image, **fields):
  params = foreign.random_params(model, 11, image)
  params = {k: lazy(v) for k, v in params.items()}
  return weights.Weights("random", "google", params, **fields)


def adapt(file, image=(32, 32), num_classes=11, adapt_options=None, **fields):
  """Fits weights to a model with these options; returns flat parameters."""
  model = model_config(**SIZE | fields)
  target = make_target(model, image, num_classes)
  params, report = weights.adapt(
    file, target, model, image, **adapt_options or {}
  )
  return flatten_dict(params, sep="/"), report


# What is loaded, and what is not.


@pytest.mark.parametrize(
  "source, options, reinitialised, ignored",
  [
    (WITH_TANH, dict(pre_logits=True), (), ()),
    # As the paper fine-tunes: both layers removed, a new head attached.
    (WITH_TANH, dict(num_classes=3), HEAD, TANH),
    # The head was trained on what tanh gave, so it goes with it.
    (WITH_TANH, dict(), HEAD, TANH),
    (PLAIN, dict(pre_logits=True), HEAD + TANH, ()),
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
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, file.params[path])
  assert report.loaded == {
    k: v.shape for k, v in expected.items() if k not in reinitialised
  }


def test_a_regression_drops_the_head_alone():
  """The name of BiT's last norm ends with "head", too."""
  file = published("bit_v2", head_dist__bias=np.zeros(7, "f"))
  left = weights.without_head(file, model_config())
  assert file.params.keys() - left.params.keys() == {*HEAD, "head_dist/bias"}
  assert "regression" in left.notes[-1]


def test_a_pooled_vector_has_a_norm_of_its_own():
  """MAE's fine-tuning drops the norm of the tokens."""
  file = published()
  options = dict(name="modern", pool="gap", final_norm="pooled")
  params, report = adapt(file, **options)
  assert report.reinitialised == ("pooled_norm/bias", "pooled_norm/scale")
  assert report.ignored == (
    "Transformer/encoder_norm/bias",
    "Transformer/encoder_norm/scale",
  )
  assert any("norm of the pooled vector" in note for note in report.notes)
  assert params["pooled_norm/scale"] is None
  np.testing.assert_array_equal(params["cls"], file.params["cls"])


def test_loops_become_scans_and_back():
  file = published()
  loop, scan = (model_config(**SIZE, scan=s) for s in (False, True))
  as_loop, _ = weights.adapt(file, make_target(loop), loop, (32, 32))
  as_scan, report = weights.adapt(file, make_target(scan), scan, (32, 32))
  stacked = stack_blocks(as_loop, model_config())
  jax.tree.map(np.testing.assert_array_equal, as_scan, stacked)
  assert BLOCK + "LayerNorm_0/scale" in report.loaded


def test_halves_become_single_floats():
  file = published()
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
    (None, NUMBERS, [0, 1, 10, *range(2, 10)], "order, by number"),
  ],
)
def test_columns_of_the_head_are_those_of_the_data_s_classes(
  old, new, order, note
):
  """`order`: numbers of the columns that are taken; None: a new head."""
  file = dataclasses.replace(
    published(WITH_TANH), class_names=tuple(old) if old else None
  )
  options = dict(class_names=tuple(new))
  params, report = adapt(file, pre_logits=True, adapt_options=options)
  assert bool(report.notes) == bool(note)
  assert not note or note in report.notes[-1]
  assert report.reinitialised == (HEAD + TANH if order is None else ())
  for path in HEAD if order else ():
    array = np.asarray(file.params[path])
    np.testing.assert_array_equal(params[path], array[..., [*order]])


def test_report():
  """Other numerics are noted, unless the model states them."""
  file = published(WITH_TANH)
  numerics = {"gelu": "erf", "ln_eps": 1e-12}
  file = dataclasses.replace(file, path="B_16.npz", options=numerics)
  _, report = adapt(file, (48, 48), num_classes=3)
  # 9,264 of the stem, 48 of cls, 37 * 48 positions, 2 * 18,960 of the blocks,
  # 96 of the last norm.
  text = weights.format_report(report)
  assert text.startswith(
    "weights         B_16.npz\n"
    "loaded          38 arrays, 49,104 parameters\n"
    f"resized         {POS_EMBEDDING}: 4x4 -> 6x6\n"
    "re-initialised  head/bias, head/kernel\n"
    "ignored         pre_logits/bias, pre_logits/kernel\n"
    "note            "
  )
  gelu, eps = report.notes
  assert "gelu=erf" in gelu and "tanh" in gelu
  assert "ln_eps=1e-12" in eps and "1e-06" in eps
  _, report = adapt(file, **numerics)
  assert not report.notes


# What is refused.


def test_what_is_dropped_or_refused_is_never_read():
  def fail():
    raise AssertionError("read")

  def unreadable(path, **changes):
    array = file.params[path]
    file.params[path] = dataclasses.replace(array, read=fail, **changes)

  file = published(WITH_TANH)
  for path in HEAD + TANH:
    unreadable(path)
  _, report = adapt(file, num_classes=3)
  assert report.reinitialised == HEAD
  for path in file.params:
    unreadable(path)
  unreadable(DENSE, shape=(10**9, 10**9))
  del file.params[POS_EMBEDDING]  # which is resampled beforehand
  with pytest.raises(ValueError, match="got shape .1000000000, 1000000000"):
    adapt(file)


def test_all_errors_come_at_once():
  norm = "Transformer/encoder_norm/scale"
  file = published(
    WITH_TANH,
    **{DENSE: np.zeros((48, 95), "f"), norm: np.ones(47, "f")},
    conv_root__kernel=np.ones((7, 7, 3, 64), "f"),
  )
  del file.params["cls"]
  with pytest.raises(ValueError) as e:
    adapt(file, num_classes=3)
  for part in (
    f"{DATA}/{WITH_TANH}.weights.npz",
    f"- {norm}: got shape (47,), expected (48,)",
    f"- {DENSE}: got shape (48, 95), expected (48, 96)",
    "- cls: missing, expected (1, 1, 48)",
    "- conv_root/kernel: got shape (7, 7, 3, 64)",
  ):
    assert part in str(e.value)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(pool="gap"), "pos_embedding: got shape .*- cls: got shape"),
    (dict(posemb="none"), "pos_embedding: got shape"),
    (dict(depth=3, scan=True), "encoderblock_2/LayerNorm_0/bias: missing"),
  ],
)
def test_the_model_that_fits_is_named_and_loads(options, message):
  file = published()
  with pytest.raises(ValueError, match=f"(?s){message}") as e:
    adapt(file, **options)
  advice, *flags = str(e.value).rsplit("\n", 1)[1].split(" --")
  assert advice == "The model that fits them:"
  # The config that was refused, and then these flags.
  wrong = to_dict(model_config(**SIZE | options)).items()
  flags = [f"config.model.{k}={v}" for k, v in wrong] + flags
  args = cli.parse(
    "train", {}, [f"--config={GLYPHS}", *(f"--{flag}" for flag in flags)]
  )
  assert not args.errors
  model = args.config.model
  _, report = weights.adapt(file, make_target(model), model, (32, 32))
  assert not (report.resized or report.reinitialised or report.ignored)


# Positions and patches are resampled to the grid of the model.


@pytest.mark.parametrize(
  "image, grid, method, stated",
  [
    ((48, 48), (6, 6), "zoom", {}),
    ((16, 64), (2, 8), "zoom", {}),  # as many patches, on another grid
    ((16, 40), (2, 5), "hf", {}),  # the filter of the file
    ((16, 40), (2, 5), "dinov2", dict(posemb_filter="dinov2")),
  ],
)
def test_positions_are_resampled_to_the_grid(image, grid, method, stated):
  file = published()
  if method == "hf":
    file = dataclasses.replace(file, posemb_filter=method)
  params, report = adapt(file, image, adapt_options=stated)
  assert report.resized == {POS_EMBEDDING: ((4, 4), grid)}
  table = np.asarray(file.params[POS_EMBEDDING], np.float32)
  np.testing.assert_array_equal(
    params[POS_EMBEDDING], resample_posemb(table, (4, 4), grid, 1, method)
  )


def test_an_unknown_grid_is_asked_for():
  table = np.zeros((1, 1 + 15, 48), "f")  # 15 patches
  file = published(WITH_TANH, **{POS_EMBEDDING: table})
  with pytest.raises(ValueError, match="got 15 patches, .* square .*cls_row"):
    adapt(file, (24, 40))
  _, report = adapt(dataclasses.replace(file, grid=(3, 5)), (24, 40))
  assert not report.resized
  with pytest.raises(ValueError, match="got 16 rows, expected 21: 4 x 5"):
    adapt(dataclasses.replace(file, grid=(4, 5)), (24, 40))


@pytest.mark.parametrize(
  "parts, tokens",
  [
    (dict(), ("cls",)),
    (dict(name="modern", distilled=True, registers=2), ("cls", "dist")),
  ],
)
@pytest.mark.parametrize("has_rows, wants_rows", [(1, 1), (1, 0), (0, 1)])
def test_rows_of_class_tokens_come_and_go(parts, tokens, has_rows, wants_rows):
  """They stay, become part of the tokens, or are zeros: no output changes."""
  model = model_config(**SIZE, **parts, cls_row=bool(has_rows))
  file = random_weights(
    model, (24, 32), grid=(3, 4), has_cls_row=bool(has_rows)
  )
  params, report = adapt(file, (40, 16), **parts, cls_row=bool(wants_rows))
  assert report.resized == {POS_EMBEDDING: ((3, 4), (5, 2))}
  assert len(report.notes) == (has_rows != wants_rows)
  table, count = np.asarray(file.params[POS_EMBEDDING]), len(tokens)
  for i, token in enumerate(tokens):
    expected = np.asarray(file.params[token])
    if has_rows and not wants_rows:
      expected = expected + table[:, i : i + 1]
    np.testing.assert_array_equal(params[token], expected)
  resized = resample_posemb(table, (3, 4), (5, 2), count * has_rows)
  rows, patches = np.split(params[POS_EMBEDDING], [count * wants_rows], 1)
  np.testing.assert_array_equal(patches, resized[:, -10:])
  if wants_rows:
    np.testing.assert_array_equal(rows, table[:, :count] * has_rows)


def test_a_class_row_of_every_block_cannot_become_part_of_cls():
  model = model_config(**SIZE, posemb_at="blocks")
  file = random_weights(model, (32, 32), grid=(4, 4), has_cls_row=True)
  with pytest.raises(ValueError, match=r"encoderblock_\*.*cls_row=True"):
    adapt(file, posemb_at="blocks", cls_row=False)


def test_a_learned_table_begins_with_fixed_sines():
  """Those of the model's grid: nothing is resized."""
  options = {"posemb": "sincos2d"}
  model = model_config(**SIZE | options)
  file = random_weights(model, (32, 32), options=options, grid=(4, 4))
  params, report = adapt(file, (48, 32))
  table = params[POS_EMBEDDING][0]
  assert not table[0].any()  # the class token's
  np.testing.assert_array_equal(table[1:], sincos2d(6, 4, 48))
  assert not report.resized and not report.reinitialised
  assert any("fixed sines" in note for note in report.notes)
  with pytest.raises(ValueError, match="pos_embedding: missing"):
    adapt(dataclasses.replace(file, options={}))


@pytest.mark.parametrize("at", ["stem", "blocks"])
def test_tables_of_rows_and_of_columns_are_resized_each_alone(at):
  options = dict(posemb="learn2d", posemb_at=at)
  model = model_config(**SIZE, **options)
  file = random_weights(model, (24, 32))
  assert weights.table_grid(file, model) == (3, 4)
  paths = [k[:-2] for k in file.params if k.endswith("pos_embedding_y")]
  assert len(paths) == (2 if at == "blocks" else 1)
  for path in paths:
    for axis, line in (("_y", [0.0, 2, 4]), ("_x", [0.0, 3, 6, 9])):
      table = np.outer(line, np.ones(24))[None].astype(np.float32)
      file.params[path + axis] = lazy(table)
  params, report = adapt(file, (40, 16), **options)
  for path in paths:
    assert report.resized[path + "_y"] == ((1, 3), (1, 5))
    assert report.resized[path + "_x"] == ((1, 4), (1, 2))
    assert params[path + "_y"][0, :, 7].tolist() == [0, 1, 2, 3, 4]
    assert params[path + "_x"][0, :, 7].tolist() == [0, 9]


@pytest.mark.parametrize("stated", [True, False])
def test_biases_of_offsets_are_resized(stated):
  """An affine function of the offset stays one; those of cls stay."""
  parts = dict(name="modern", posemb="relative_bias", qkv_bias="no_key")
  model, grid = model_config(**SIZE, **parts), (3, 3)
  file = random_weights(model, (24, 24), grid=grid if stated else None)
  y, x = np.mgrid[-2:3, -2:3].reshape(2, -1, 1)
  ends = np.full((3, 4), [[5.0], [6.0], [7.0]])
  table = np.concatenate([np.tile(0.5 * y - 0.25 * x, 4), ends])
  paths = [p for p in file.params if p.endswith("relative_bias")]
  file.params.update({p: lazy(table.astype("f")) for p in paths})
  params, report = adapt(file, (40, 16), **parts)
  assert report.resized == dict.fromkeys(paths, ((3, 3), (5, 2)))
  y, x = np.mgrid[-2:2:9j, -2:2:3j].reshape(2, -1, 1)  # zoom keeps corners
  expected = np.concatenate([np.tile(0.5 * y - 0.25 * x, 4), ends])
  for path in paths:
    np.testing.assert_allclose(params[path], expected, atol=1e-6)
  assert weights.trained_at(file) == (24, 24)
  file = random_weights(model_config(**SIZE, **parts), (24, 16))
  adapt(file, (24, 16), **parts)  # as many rows as the images need
  with pytest.raises(ValueError, match="18 rows of offsets; pass grid="):
    adapt(file, (40, 16), **parts)


def test_the_patch_embedding_is_resized_if_asked():
  file, kernel = published(), "embedding/kernel"
  # As many tokens as before: no other change.
  image, options = (16, 16), dict(variant="B/4")
  with pytest.raises(ValueError, match="(?s)embedding/kernel.*patch=4"):
    adapt(file, image, **options)
  resize = dict(resize_patch=True)
  params, report = adapt(file, image, adapt_options=resize, **options)
  assert report.resized == {kernel: ((8, 8), (4, 4))}
  patches = np.asarray(file.params[kernel], np.float32)
  np.testing.assert_array_equal(
    params.pop(kernel), resample_patch_kernel(patches, (4, 4))
  )
  for path, array in params.items():
    np.testing.assert_array_equal(array, file.params[path])
