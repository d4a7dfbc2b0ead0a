"""Scores a checkpoint: `vit-jax evaluate --checkpoint=RUN`."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from vit_jax.config import ConfigError, cli, config_files

PROBES = {
  "fewshot": "data set (folder:/path); scores features by few labels",
  "linear": "data set; scores features by a linear layer on all labels",
  "knn": "data set; scores features by a vote of the nearest images",
}
FLAGS = {
  "checkpoint": "run, one of its checkpoints, or published weights",
  **PROBES,
  "workdir": "folder of evaluation.jsonl (default: the run or runs/<file>)",
  "mean": "normalisation in training: half, imagenet, clip or MEAN/STD",
  "dtype": "float32 or bfloat16, for features of published weights",
  "json": "print only the line of evaluation.jsonl",
  **cli.PROCESS_FLAGS,
}


def parse(argv: Sequence[str]) -> cli.Args:
  """Parses the arguments after the verb."""
  return cli.parse(
    "evaluate",
    FLAGS,
    argv,
    switches=("json",),
    alone=tuple(PROBES),
    description="Scores a checkpoint, or its features with --fewshot, --linear"
    " or --knn.",
    example="vit-jax evaluate --checkpoint=runs/b16\n"
    "vit-jax evaluate --checkpoint=B_16.npz --fewshot=folder:/data/birds",
  )


def main(argv: Sequence[str]) -> None:
  """Scores the checkpoint, or ends the process with all errors."""
  run(parse(argv))


def run(args: cli.Args) -> None:
  """Joins the other processes, checks the arguments and evaluates."""
  import jax

  from vit_jax import evaluate, malloc
  from vit_jax.batch import DataError
  from vit_jax.callbacks import startup
  from vit_jax.data.sources import Sources
  from vit_jax.distributed import exit_codes, processes
  from vit_jax.finetune import probes
  from vit_jax.tools.scoring import published_scores

  flags = args.flags
  wants_json = flags["json"] == "true"
  pages = []
  try:
    with contextlib.redirect_stdout(sys.stderr if wants_json else sys.stdout):
      processes.initialise(flags, args.errors)
      is_first = jax.process_index() == 0
      malloc.reuse_freed_memory()
      path, config = flags["checkpoint"], args.config
      run_folder = path and config_files.run_of(path)
      startup.use_cache(flags["workdir"] or run_folder and str(run_folder))
      if not path:
        args.errors.append(cli.NO_CHECKPOINT)
      if args.errors:
        raise ConfigError(args.errors)
      wanted = {kind: flags[kind] for kind in probes.KINDS if flags[kind]}
      # Published weights without a config: their file states the model.
      is_file_alone = wanted and not (args.config_name or run_folder)
      if flags["dtype"] and not is_file_alone:
        raise ConfigError(
          [
            f"--dtype: got {flags['dtype']!r}, which is only for --fewshot,"
            " --linear or --knn on published weights without a config; set"
            " config.model.dtype."
          ]
        )
      opened = Sources(config.data.data_dir, fake=config.fake_data)
      if wanted:
        if is_file_alone:
          config = probes.config_of_file(config, path, flags["dtype"])
          if is_first:
            print(f"dtype           {config.model.dtype}")
        config = probes.with_probes(config, wanted, opened)
      name = published_scores.name_of(path)
      workdir = str(flags["workdir"] or run_folder or f"runs/{name}")
      if not flags["workdir"] and is_training(run_folder):
        row = evaluate.record(config, path, None, opened, flags["mean"])
        if is_first:
          print(
            f"not written: a run is training in {run_folder}; --workdir=DIR"
            " writes evaluation.jsonl to another folder"
          )
      else:
        row = evaluate.record(
          config,
          path,
          workdir,
          opened,
          flags["mean"],
          lambda e, row: pages.append(probes.write(e, row, workdir)),
        )
      if any(pages) and "://" not in workdir:  # which report does not read
        print(f"see         vit-jax report {workdir}", flush=True)
  except (ConfigError, DataError) as e:
    exit_codes.refuse(str(e))
  if wants_json and jax.process_index() == 0:
    print(json.dumps(row, ensure_ascii=False))


def is_training(run_folder: str | os.PathLike | None) -> bool:
  """Whether a process of this machine is training in a folder."""
  from vit_jax.callbacks import run_record

  if run_folder is None:
    return False
  record = run_record.read(pathlib.Path(run_folder) / run_record.FILE)
  return bool(record) and run_record.is_alive(record) is True
