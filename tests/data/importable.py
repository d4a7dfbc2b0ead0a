"""Small data sets of images, written in every form that can be imported."""

import io
import tarfile

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from vit_jax.data import sources

NAMES = ("ant", "bee", "cat")


def encoded(number, form="jpeg", size=(10, 8), **options):
  """An image that no other number has."""
  pixels = np.random.default_rng(number).integers(
    256, size=(*size[::-1], 3), dtype=np.uint8
  )
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, form, **options)
  return file.getvalue()


def images(start, count):
  """[(encoded, class)], of JPEG and PNG in turn."""
  return [
    (encoded(i, ("jpeg", "png")[i % 2]), NAMES[i * 7 % 3])
    for i in range(start, start + count)
  ]


SPLITS = {"train": images(0, 12), "validation": images(100, 5)}


def tar_of(members, mode="w"):
  """The bytes of a tar of pairs of a name and its bytes."""
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode=mode) as tar:
    for name, data in members:
      member = tarfile.TarInfo(name)
      member.size = len(data)
      tar.addfile(member, io.BytesIO(data))
  return file.getvalue()


def write_folder(root):
  for split, records in SPLITS.items():
    for i, (image, name) in enumerate(records):
      form = "png" if image.startswith(b"\x89PNG") else "jpg"
      path = root / split / name / f"{i}.{form}"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(image)
  return f"folder:{root}"


def write_csv(root):
  """A file of each split, whose images are in folders beside it."""
  for split, records in SPLITS.items():
    lines = ["file,label"]
    (root / split).mkdir()
    for i, (image, name) in enumerate(records):
      (root / split / f"{i}.jpg").write_bytes(image)
      lines.append(f"{split}/{i}.jpg,{name}")
    (root / f"{split}.csv").write_text("\n".join(lines))
  return f"csv:{root}"


def write_webdataset(root):
  """Two tars of each split, one of them compressed."""
  for split, records in SPLITS.items():
    for part, (suffix, mode) in enumerate((("tar", "w"), ("tar.gz", "w:gz"))):
      members = []
      for i, (image, name) in enumerate(records[part::2]):
        form = "png" if image.startswith(b"\x89PNG") else "JPG"
        members.append((f"x/{i:04}.cls", name.encode()))
        members += [(f"x/{i:04}.{form}", image), (f"x/{i:04}.json", b"{}")]
      path = root / f"a-{split}-{part}.{suffix}"
      path.write_bytes(tar_of(members, mode))
  return f"webdataset:{root}"


def write_parquet(root):
  for split, records in SPLITS.items():
    images = pyarrow.array([{"bytes": i, "path": "p"} for i, _ in records])
    names = [name for _, name in records]
    columns = {"id": range(len(records)), "image": images, "label": names}
    rows = pyarrow.table(columns)
    for part in range(2):
      some = rows.slice(part * 3, 3 if part == 0 else None)
      parquet.write_table(some, root / f"{split}-{part}.parquet")
  return f"parquet:{root}/*.parquet"


def write_hugging_face(root):
  datasets = pytest.importorskip("datasets")
  features = datasets.Features(
    {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
  )
  made = datasets.DatasetDict()
  for split, records in SPLITS.items():
    images = [{"bytes": image, "path": None} for image, _ in records]
    columns = {"image": images, "label": [NAMES.index(n) for _, n in records]}
    made[split] = datasets.Dataset.from_dict(columns, features=features)
  made.save_to_disk(root)
  return f"hf:{root}"


def stored(name, split, data_dir):
  """{encoded image: name of its class}"""
  source = sources.open_source(name, split, str(data_dir))
  records = source.records().as_numpy_iterator()
  return {r["image"]: source.class_names[r["label"]] for r in records}


WRITERS = {
  "folder:": write_folder,
  "csv:": write_csv,
  "webdataset:": write_webdataset,
  "parquet:": write_parquet,
  "hf:": write_hugging_face,
}
