"""The frame of a self-contained HTML page: one column, light or dark."""

import base64
import html
import io
import itertools
import pathlib
import re
import string
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from PIL import Image

# A line may break here in a name, a path or operations, but not in a number.
_BREAK = re.compile(r"(?<=[/_|])(?=\w)|(?<=,)(?=[^\d\s])")
_STATIC = pathlib.Path(__file__).parent / "static"
_STYLE = (_STATIC / "page.css").read_text("utf-8")
# CSS variable -> colour of the light page, from the first block of the style.
COLOURS = dict(
  re.findall(r"--([\w-]+): (#[0-9a-f]{6});", _STYLE.partition("}")[0])
)


def page(title: str, body: str) -> str:
  """Returns the document; `body` is HTML, `title` is text."""
  frame = string.Template((_STATIC / "page.html").read_text("utf-8"))
  return frame.substitute(title=html.escape(title), style=_STYLE, body=body)


def chart(svg: str, alt: str) -> str:
  """Returns an SVG file as HTML inside the page.

  Colours of the light page become variables of the page's style, so that the
  chart is light or dark like the page.

  Args:
    svg: A file that `charts.render` drew in `COLOURS`.
    alt: Text that describes the chart.
  """
  names = {colour: name for name, colour in COLOURS.items()}
  _, _, rest = svg.partition("<svg")
  # The page does not need these, or has them once for all charts.
  rest = re.sub(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->\n?"
    r'| xmlns(:\w+)?="[^"]*"',
    "",
    rest,
    flags=re.DOTALL,
  )
  rest = re.sub(
    r"#[0-9a-f]{6}\b",
    lambda m: f"var(--{names[m[0]]})" if m[0] in names else m[0],
    rest,
  )
  return (
    f'<figure><svg role="img" aria-label="{html.escape(alt)}"{rest}</figure>'
  )


def cards(
  examples: Iterable[tuple[np.ndarray, str, str, float]],
  number: Callable[[float], str] = lambda share: f"{100 * share:.0f}%",
  records: Sequence[str] = (),
) -> str:
  """Returns images with a model's predictions; mistakes have a frame.

  Columns are as wide as the longest word of a name, so that no word is broken.

  Args:
    examples: (image uint8 [h, w, 3], true name, predicted name, probability
      0 to 1) for each image.
    number: Returns the text of a probability, or of another score.
    records: Paths or names of the images, shown below them; (): none.
  """
  parts, longest = [], 0
  with_names = itertools.zip_longest(examples, records, fillvalue="")
  for (image, label, guess, probability), record in with_names:
    is_right = label == guess
    answer = f"<b><bdi>{breakable(guess)}</bdi></b>"
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
      f"{mark}{answer} {chance}{truth}</figcaption></figure>"
    )
    parts_of_names = [p for name in (label, guess) for p in _unbroken(name)]
    longest = max([longest, *map(len, parts_of_names)])
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
  """Returns a small image without loss, with sharp pixels; a photo as JPEG."""
  is_small = max(image.shape[:2]) <= 64
  kind, how = ("png", {}) if is_small else ("jpeg", {"quality": 88})
  buffer = io.BytesIO()
  if image.shape[-1] == 1:  # grey
    image = image[..., 0]
  Image.fromarray(image).save(buffer, kind, **how)
  style = ' class="pixels"' if is_small else ""
  return (
    f'<img{style} alt="{html.escape(label)}"'
    f' src="{_link(kind, buffer.getvalue())}">'
  )


def _link(kind: str, data: bytes) -> str:
  return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def breakable(text: str) -> str:
  """Returns text as HTML that may break after / and _, and in a list.

  Example:
    >>> breakable("a_b/c=1,d=2, 1,000 <")
    'a_<wbr>b/<wbr>c=1,<wbr>d=2, 1,000 &lt;'
  """
  return "<wbr>".join(map(html.escape, _BREAK.split(text)))


def _unbroken(text: str) -> list[str]:
  """Returns the parts of a text that do not break."""
  return [
    w for part in _BREAK.split(text) for w in re.split(r"\s|(?<=-)", part)
  ]


def table(kind: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table of texts; the first cell of a row is its name.

  Args:
    kind: "facts" (texts) or "numbers" (aligned right).
    head: First row.
    rows: Other rows; a cell that starts with "*" is the best of its column.
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


def states(rows: Iterable[tuple[str, str, str, str]]) -> str:
  """Returns a list of runs with their states.

  Args:
    rows: (name, kind of state, text, remark) for each run. The kind is
      "finished", "going", "stopped" or "unknown". Name and remark may be "".
  """
  items = "".join(
    f'<li class="{kind}">'
    + (f"<b>{breakable(name)}</b>: " if name else "")
    + breakable(text)
    + (f'<span class="wrong">{breakable(remark)}</span>' if remark else "")
    + "</li>"
    for name, kind, text, remark in rows
  )
  return f'<ul class="states">{items}</ul>'


def share(value: float | None) -> str:
  """Returns a share as text in percent."""
  return "—" if value is None else f"{100 * value:.1f}%"


def missing(what: str) -> str:
  """Returns a line about missing parts; "" if nothing is missing."""
  what = breakable(re.sub(r"\.(?=; |$)", "", what))  # errors are sentences
  return what and f'<p class="missing">Left out: {what}.</p>'


def error_text(error: Exception) -> str:
  """Returns the error of a damaged file as a text for `missing`."""
  return str(error)[:200] or type(error).__name__
