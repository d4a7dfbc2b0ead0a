"""Trains the points of searches, chooses by `val`, scores the best one once."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from vit_jax import experiment, malloc, missing_data, run_checks, train
from vit_jax.callbacks import startup
from vit_jax.config import HELD_OUT, Config, ConfigError, cli, json_file
from vit_jax.data.sources import Sources
from vit_jax.distributed import agreement, exit_codes, processes
from vit_jax.finetune import one_run
from vit_jax.finetune.one_run import RESULT, print_once, read_by_first
from vit_jax.tools.sweep import table
from vit_jax.tools.sweep.points import (
  FINAL,
  Task,
  best_point,
  check,
  final_config,
  grid_of,
  other_run_errors,
  points,
  records_of,
  with_fixed_init,
)
from vit_jax.writers import atomic_files, run_info

TABLE, TEXT = "sweep.json", "sweep.md"


def sweep(
  tasks: Mapping[str, Task],
  workdir: str,
  *,
  only_available: bool = False,
  against: str | None = None,
  run: one_run.Run = one_run.run,
) -> dict[str, Any]:
  """Runs the search of every task, and scores the best point of each once.

  Args:
    tasks: Name -> search; a single task may have the name "".
    workdir: Folder of the runs, `sweep.json` and `sweep.md`. A task with a name
      has its own folder in it.
    only_available: Whether to leave out tasks whose data are not on disk.
    against: Folder of another search to compare with; None: no comparison.
    run: Function that trains a point.

  Returns:
    The contents of `sweep.json`: `tasks`, each with its `points`, the `best`,
    the scores of the `final` run and its `splits`; and `left_out`.

  Raises:
    ConfigError: A search cannot work; it lists all errors before the first run.
  """
  searches: dict[str, Task] = {}
  left_out: dict[str, dict[str, str]] = {}
  errors: list[str] = []
  for name, task in tasks.items():
    if only_available and (missing := _missing(task.config)):
      left_out[name] = {"group": task.group, "reason": missing}
    else:
      searches[name] = with_fixed_init(task, _folder(workdir, name))
  if only_available:
    data_dir = next(iter(tasks.values())).config.data.data_dir
    missing_data.agree(data_dir, {name: name in searches for name in tasks})
  for name, task in searches.items():  # all processes the same ones
    prefix = f"{name}: " if name else ""
    errors += [prefix + e for e in check(task, _folder(workdir, name))]
  if left_out and not searches:
    errors += [f"{name}: {v['reason']}" for name, v in left_out.items()]
  other = None
  try:
    other = _table_in(against) if against else None
  except ValueError as e:
    errors.append(f"--against: {e}")
  if not errors:
    try:
      with atomic_files.os_errors(epath.Path(workdir)):
        epath.Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as e:
      errors.append(atomic_files.folder_error(workdir, e))
  if errors:
    raise ConfigError(dict.fromkeys(errors))
  for name, values in left_out.items():
    print_once(f"left out    {name}: {values['reason']}")

  results: dict[str, Any] = {"tasks": {}, "left_out": left_out}
  for name, task in searches.items():

    def show(result, name=name):
      results["tasks"][name] = result
      _write(epath.Path(workdir) / TABLE, json.dumps(results, indent=1) + "\n")
      text = table.markdown(results, other)
      _write(epath.Path(workdir) / TEXT, text)

    result = search(task, _folder(workdir, name), show, run)
    print_once(table.task_text(name, result))
  if len(tasks) > 1 or other:
    print_once(table.overview(results, other))
  return results


def search(
  task: Task,
  folder: epath.Path,
  show: Callable[[dict[str, Any]], None],
  run: one_run.Run,
) -> dict[str, Any]:
  """Trains the points, chooses one by `val`, then trains and scores it once.

  Args:
    task: The search; `check` returned no error.
    folder: Folder of its runs.
    show: Function that gets the results so far.
    run: Function that trains a point.

  Raises:
    ConfigError: The records of a split changed, or the last run was started
      with other options.
  """
  result: dict[str, Any] = {
    "group": task.group,
    "grid": {k: list(v) for k, v in task.grid.items()},
    "points": [],
    "best": None,
    "final": None,
    "splits": _splits(task.config, folder),
    "fake_data": task.config.fake_data,
  }
  show(result)
  every = points(task)
  for point in every:
    row = run(point.config, folder / point.name, False)
    result["points"].append({"name": point.name, "values": point.values, **row})
    show(result)
  if best := best_point(result["points"]):
    result["best"] = best
    (config,) = (p.config for p in every if p.name == best)
    config = final_config(task.config, config)
    if errors := other_run_errors(config, folder / FINAL):
      raise ConfigError(errors)
    result["final"] = run(config, folder / FINAL, True)
    show(result)
  return result


def _splits(config: Config, folder: epath.Path) -> dict[str, Any]:
  """Returns what the data of the splits are, see `points.records_of`.

  For a finished search the stored values are returned.

  Raises:
    ConfigError: The training records or the held-out records are not those with
      which the search began.
  """
  path = folder / "splits.json"
  known = read_by_first(path)
  if known is not None and read_by_first(folder / FINAL / RESULT) is not None:
    return known
  text = ""
  if jax.process_index() == 0:
    sources = Sources(config.data.data_dir, fake=config.fake_data)
    text = json.dumps(records_of(config, sources))
  current = json.loads(agreement.broadcast_text(text))
  # Finished points would be compared with points on other data. The test data
  # may change until they are scored.
  if errors := [
    f"config.data.dataset: got {current[name]['dataset']!r}"
    f" [{current[name]['split']}] with other records than when the search in"
    f" {folder} began; use another --workdir, or delete this folder."
    for name in ("train", HELD_OUT)
    if known and known[name] != current[name]
  ]:
    raise ConfigError(errors)
  if jax.process_index() == 0:
    folder.mkdir(parents=True, exist_ok=True)
    run_info.write_json(str(folder), path.name, current)
  return current


def _table_in(workdir: str) -> dict[str, Any]:
  """Returns the table of another search.

  Raises:
    ValueError: There is no table, or it is damaged.
  """
  path = epath.Path(workdir) / TABLE
  if not path.exists():
    raise ValueError(f"got {workdir!r}, expected a folder with {TABLE}.")
  return json_file.read(path)


def _missing(config: Config) -> str | None:
  """Returns an error if data are not on disk, else None."""
  run = experiment.Experiment(config)
  data = config.data
  wanted = [(data.dataset, data.split)]
  wanted += [(e.dataset, e.split) for e in run.evals]
  if all(run.sources.is_on_disk(*names) for names in wanted):
    return None
  every = (
    error for part in run_checks.data_errors(run).values() for error in part
  )
  return next(every)


def _folder(workdir: str, name: str) -> epath.Path:
  return epath.Path(workdir) / name if name else epath.Path(workdir)


def _write(path: epath.Path, text: str) -> None:
  if jax.process_index() == 0:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.replace(path, text)


def main(parsed: Mapping[str, tuple[str, str, cli.Args]]) -> None:
  """Joins the other processes, checks the searches and runs them."""
  args = [a for _, _, a in parsed.values()]
  flags, errors = args[0].flags, [error for a in args for error in a.errors]
  try:
    processes.initialise(flags, errors)
    workdir = flags["workdir"] or f"runs/{args[0].config_name}_sweep"
    startup.use_cache(workdir)
    malloc.reuse_freed_memory()
    if errors:
      raise ConfigError(dict.fromkeys(errors))
    tasks = {
      name: Task(a.config, grid_of(flags["grid"], source), group)
      for name, (group, source, a) in parsed.items()
    }
    sweep(
      tasks,
      workdir,
      only_available=flags["available"] == "true",
      against=flags["against"],
    )
  except train.EXPECTED_ERRORS as e:
    exit_codes.refuse(str(e))
  except KeyboardInterrupt:
    exit_codes.refuse("stopped; the same command continues the search")
