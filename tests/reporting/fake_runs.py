"""Runs and their folders as runs write them; and pages, read."""

import html.parser
import json
import pathlib

from vit_jax.config import Config, to_dict
from vit_jax.tools.reporting.charts import ChartFiles
from vit_jax.tools.reporting.runs import Run


def run(rows=(), config=None, metadata=None, name="a", **fields):
  """A run that is in no folder, of a `Config` or a part of its dict."""
  if isinstance(config, Config):
    config = to_dict(config)
  path = pathlib.Path(name)
  return Run(name, path, config or {}, metadata or {}, list(rows), **fields)


def write(path, rows=(), config=None, metadata=None):
  """Writes the metrics of a run and, where given, config and metadata."""
  path.mkdir(parents=True, exist_ok=True)
  if isinstance(config, Config):
    config = to_dict(config)
  for name, value in (("config", config), ("metadata", metadata)):
    if value is not None:
      (path / f"{name}.json").write_text(json.dumps(value))
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (path / "metrics.jsonl").write_text(text)
  return path


class Drawn(ChartFiles):
  """Keeps the axes of charts by name, and writes none."""

  def __init__(self):
    super().__init__()
    self.axes = {}

  def add(self, name, draw, alt):
    self.axes[name] = draw().axes[0]
    return ""


class Page(html.parser.HTMLParser):
  """Collects tags; complains of one that is closed and was not open."""

  def __init__(self, text):
    super().__init__()
    self.images, self.charts, self.links, self.open = [], [], [], []
    self.rows, self.tiles, self.text = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    if tag == "img":
      self.images.append(attrs)
    if tag == "svg":
      self.charts.append(attrs.get("aria-label"))
    self.links += [
      v for k, v in attrs.items() if k in ("src", "href", "xlink:href")
    ]
    if tag == "tr":
      self.rows.append([])
    if tag in ("th", "td"):
      self.rows[-1].append("")
    if tag == "b" and "tiles" in self.classes():
      self.tiles.append([])
    if tag not in ("img", "meta", "link", "wbr", "br"):
      self.open.append((tag, attrs.get("class")))

  def handle_startendtag(self, tag, attrs):
    """A tag such as <path/>, which nothing closes."""
    self.handle_starttag(tag, attrs)
    if tag not in ("img", "meta", "link", "wbr", "br"):
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    tags = [tag for tag, _ in self.open]
    if "td" in tags or "th" in tags:
      self.rows[-1][-1] += data
    elif "tiles" in self.classes():
      if tags[-1] == "b":
        self.tiles[-1] += [data, "", ""]
      else:
        self.tiles[-1][1 + (tags[-1] == "i")] += data
    if "style" not in tags:
      self.text.append(data)

  def classes(self):
    return [name for _, name in self.open]
