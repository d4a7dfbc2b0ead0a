"""The frame of a self-contained HTML page: one column, light or dark."""

import base64
import html
import io
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from PIL import Image

# Where a line may break inside a name, a path or operations, but not inside a
# number.
_BREAK = re.compile(r"(?<=[/_|])(?=\w)|(?<=,)(?=[^\d\s])")
_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d1d1f; --soft: #63636a; --line: #e2e2e6;
  --wash: #f5f5f7; --wrong: #b3261e; --good: #00744f; --going: #0068a8;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #17181a; --ink: #e8e8ea; --soft: #a2a2aa; --line: #35363a;
    --wash: #222327; --wrong: #ff8f85; --good: #2fc99a; --going: #56b4e9;
  }
}
* { box-sizing: border-box; }
body {
  max-width: 960px; margin: 0 auto; padding: 32px 16px 64px;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere;
}
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; }
h3 { font-size: 16px; margin: 20px 0 8px; }
h2 {
  font-size: 20px; margin: 48px 0 12px; padding-top: 16px;
  border-top: 1px solid var(--line);
}
p { margin: 0 0 12px; max-width: 70ch; }
.soft, figcaption, .missing { color: var(--soft); font-size: 14px; }
.missing { border-left: 3px solid var(--line); padding-left: 10px; }
.wide + .missing { margin-top: 16px; }
.tiles {
  display: grid; gap: 12px; margin-top: 20px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
}
.tiles div { background: var(--wash); border-radius: 8px; padding: 12px 14px; }
.tiles b {
  display: block; font-size: 24px; line-height: 1.25;
  font-variant-numeric: tabular-nums;
}
.tiles span { display: block; font-size: 14px; line-height: 1.35; }
.tiles i {
  display: block; font-style: normal; color: var(--soft); font-size: 13px;
  line-height: 1.35;
}
.grid {
  display: grid; gap: 16px; margin: 12px 0; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
}
.grid figure { max-width: 560px; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; }
img.dark { display: none; }
@media screen and (prefers-color-scheme: dark) {
  img.light { display: none; }
  img.dark { display: block; }
}
.cards {
  display: grid; gap: 14px 12px; margin: 0 0 24px; font-size: 13px;
  grid-template-columns: repeat(
    auto-fill, minmax(min(100%, max(88px, var(--card))), 1fr));
}
.cards img { max-width: 176px; }
.cards .pixels { image-rendering: pixelated; }
.cards figcaption { font-size: 13px; line-height: 1.35; margin-top: 5px; }
.cards b, .cards .prob { color: var(--ink); }
.cards .wrong img { outline: 3px solid var(--wrong); outline-offset: -3px; }
.cards .wrong b { color: var(--wrong); }
.gallery {
  display: grid; gap: 16px; margin: 12px 0 24px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr));
}
.gallery figure { max-width: 600px; }
.gallery figcaption { font-size: 13px; line-height: 1.35; margin-top: 5px; }
.states { list-style: none; margin: 20px 0 0; padding: 0; font-size: 14px; }
.states li { padding: 3px 0 3px 22px; text-indent: -22px; }
.states li::before { display: inline-block; width: 22px; text-indent: 0; }
.states .finished::before { content: "✓"; color: var(--good); }
.states .going::before { content: "▸"; color: var(--going); }
.states .stopped::before { content: "✗"; color: var(--wrong); }
.states .unknown::before { content: "?"; color: var(--soft); }
.states .wrong { display: block; text-indent: 0; color: var(--wrong); }
.spent {
  display: flex; height: 22px; border-radius: 6px; overflow: clip;
  background: var(--wash); margin: 12px 0 10px;
  -webkit-print-color-adjust: exact; print-color-adjust: exact;
}
.spent i { display: block; border-right: 1px solid var(--paper); }
.spent i:last-child { border-right: 0; }
.spent-key {
  display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0; padding: 0;
  list-style: none; font-size: 14px; font-variant-numeric: tabular-nums;
}
.spent-key i {
  display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 7px;
  -webkit-print-color-adjust: exact; print-color-adjust: exact;
}
.spent-step { background: #009e73; }
.spent-input { background: #e69f00; }
.spent-evaluation { background: #0072b2; }
.spent-save { background: #56b4e9; }
.spent-start { background: #8e8e96; }
.spent-compile { background: #b9b9c0; }
.spent-repeated { background: #cc79a7; }
.spent-restart { background: #d55e00; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; line-height: 1.35; }
th, td {
  padding: 6px 14px 6px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line);
}
th { font-weight: 600; }
.facts { width: 100%; }
.facts tr:first-child th { color: var(--ink); }
.facts th:first-child, .numbers th:first-child {
  color: var(--soft); font-weight: 400; min-width: 15ch;
}
.facts td, .numbers td { font-variant-numeric: tabular-nums; }
.facts td { min-width: 110px; overflow-wrap: break-word; }
.numbers { width: 100%; }
.numbers th, .numbers td { padding: 8px 0; }
.numbers td, .numbers th:not(:first-child) {
  text-align: right; white-space: nowrap; padding-left: 14px;
}
@media (max-width: 560px) {
  .facts { font-size: 12px; }
  .facts td { min-width: 72px; padding-right: 8px; }
  .numbers { font-size: 13px; }
  .numbers td, .numbers th:not(:first-child) { padding-left: 8px; }
}
details { margin-top: 10px; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); }
pre {
  overflow-x: auto; background: var(--wash); border-radius: 8px;
  padding: 12px; font-size: 12px; line-height: 1.4;
}
@media print {
  :root { color-scheme: light; }
  body { padding: 0; }
  h2, h3 { break-after: avoid; }
  h2 + p, h3 + p { break-after: avoid; }
  figure, tr, .tiles div { break-inside: avoid; }
  .grid { grid-template-columns: 1fr 1fr; }
  .gallery { grid-template-columns: 1fr 1fr 1fr; }
  .wide { overflow-x: visible; }
  .facts, .numbers { font-size: 11px; }
  .facts td { min-width: 0; padding-right: 8px; }
}
"""


def page(title: str, body: str) -> str:
  """Returns the whole document; `body` is HTML, `title` is text."""
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def picture(light: bytes, dark: bytes, alt: str) -> str:
  """Returns a chart as HTML with its pictures, two SVG files, embedded.

  The page's colours decide which of the two is shown; in print it is the light
  one. A <picture> would print the dark one from a dark browser.
  """
  files = (("light", light), ("dark", dark))
  return "<figure>{}</figure>".format(
    "".join(
      f'<img class="{kind}" alt="{html.escape(alt)}"'
      f' src="{_link("svg+xml", file)}">'
      for kind, file in files
    )
  )


def cards(
  examples: Iterable[tuple[np.ndarray, str, str, float]],
  number: Callable[[float], str] = lambda share: f"{100 * share:.0f}%",
  records: Sequence[str] = (),
) -> str:
  """Returns images with a model's predictions, errors framed and marked.

  Columns are as wide as the longest word of a name, so that none is broken.

  Args:
    examples: (uint8 [h, w, 3], true name, name of the prediction, its
      probability from 0 to 1) each.
    number: Makes the text of a probability, or of another score.
    records: Paths or names of the images, shown below them; (): none.
  """
  parts, longest = [], 0
  with_names = itertools.zip_longest(examples, records, fillvalue="")
  for (image, label, guess, probability), record in with_names:
    is_right = label == guess
    said = f"<b><bdi>{breakable(guess)}</bdi></b>"
    chance = f'<span class="prob">{number(probability)}</span>'
    kind, mark, truth = "card", "", ""
    if not is_right:
      kind, mark = "card wrong", "✗ "
      truth = f"<br>true: <bdi>{breakable(label)}</bdi>"
    if record:
      name = breakable(pathlib.PurePath(record).name)
      truth += f'<br><small title="{html.escape(record)}">{name}</small>'
    parts.append(
      f'<figure class="{kind}">{_image(image, label)}<figcaption>'
      f"{mark}{said} {chance}{truth}</figcaption></figure>"
    )
    words = [w for name in (label, guess) for w in _words(name)]
    longest = max([longest, *map(len, words)])
  return (
    f'<div class="cards" style="--card: {longest + 1}ch">{"".join(parts)}</div>'
  )


def gallery(pictures: Iterable[tuple[Image.Image, str]]) -> str:
  """Returns pictures with their captions, as JPEG."""
  parts = []
  for image, caption in pictures:
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=88, subsampling=0)
    parts.append(
      f'<figure><img alt="{html.escape(caption)}"'
      f' src="{_link("jpeg", buffer.getvalue())}">'
      f"<figcaption><bdi>{breakable(caption)}</bdi></figcaption></figure>"
    )
  return f'<div class="gallery">{"".join(parts)}</div>'


def _image(image: np.ndarray, label: str) -> str:
  """Returns a small image losslessly, with sharp pixels, a photo as JPEG."""
  is_small = max(image.shape[:2]) <= 64
  kind, how = ("png", {}) if is_small else ("jpeg", {"quality": 88})
  buffer = io.BytesIO()
  Image.fromarray(image).save(buffer, kind, **how)
  style = ' class="pixels"' if is_small else ""
  return (
    f'<img{style} alt="{html.escape(label)}"'
    f' src="{_link(kind, buffer.getvalue())}">'
  )


def _link(kind: str, data: bytes) -> str:
  return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def breakable(text: str) -> str:
  """Returns text as HTML whose lines may break after / and _, and in a list.

  Example:
    >>> breakable("a_b/c=1,d=2, 1,000 <")
    'a_<wbr>b/<wbr>c=1,<wbr>d=2, 1,000 &lt;'
  """
  return "<wbr>".join(map(html.escape, _BREAK.split(text)))


def _words(text: str) -> list[str]:
  """Returns the parts of a text that stay on one line."""
  return [
    w for part in _BREAK.split(text) for w in re.split(r"\s|(?<=-)", part)
  ]


def table(kind: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table of texts; the first cell of a row is its name.

  Args:
    kind: "facts" (texts) or "numbers" (right-aligned).
    head: First row.
    rows: All others; a cell that starts with "*" is the best of its column.
  """
  cell = lambda text: (
    f"<td><b>{breakable(text[1:])}</b></td>"
    if text.startswith("*")
    else f"<td>{breakable(text)}</td>"
  )
  first = "".join(f"<th>{breakable(text)}</th>" for text in head)
  rest = "".join(
    f"<tr><th>{breakable(name)}</th>{''.join(map(cell, cells))}</tr>"
    for name, *cells in rows
  )
  return (
    f'<div class="wide"><table class="{kind}"><tr>{first}</tr>{rest}</table>'
    "</div>"
  )


def states(
  rows: Iterable[tuple[str, str, str, str]], is_numbered: bool = False
) -> str:
  """Returns a list of runs with what became of them.

  Args:
    rows: (name, "finished" "going" "stopped" or "unknown", text, what went
      wrong on the way) each; the name and the last may be "".
    is_numbered: Whether numbers from 1 stand before the names.
  """
  items = "".join(
    f'<li class="{kind}">{f"{i} " if is_numbered else ""}'
    + (f"<b>{breakable(name)}</b>: " if name else "")
    + breakable(text)
    + (f'<span class="wrong">{breakable(remark)}</span>' if remark else "")
    + "</li>"
    for i, (name, kind, text, remark) in enumerate(rows, 1)
  )
  return f'<ul class="states">{items}</ul>'


def share(value: float | None) -> str:
  """Returns a share as text in percent, as in tables."""
  return "—" if value is None else f"{100 * value:.1f}%"


def missing(what: str) -> str:
  """Returns a line on what the report lacks, or nothing if it lacks nothing."""
  what = breakable(re.sub(r"\.(?=; |$)", "", what))  # errors are sentences
  return what and f'<p class="missing">Left out: {what}.</p>'
