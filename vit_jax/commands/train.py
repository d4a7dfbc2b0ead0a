"""Trains a Vision Transformer: `vit-jax train --config=FILE`."""

import signal
import sys
import time
from collections.abc import Callable, Sequence

from vit_jax.callbacks import Callback, Stop, run_record, startup
from vit_jax.callbacks.preemption import Preemption
from vit_jax.callbacks.watchdog import Watchdog
from vit_jax.config import Config, cli
from vit_jax.distributed.signals import StopSignals, end_at_once
from vit_jax.writers.console import write

FLAGS = {
  "workdir": "folder of the run (default: runs/<config name>)",
  "profile": "step after which five steps are traced for TensorBoard's"
  " profiler (default: none)",
  "allow_change": "options or sections that may differ when a run is resumed,"
  " separated by commas: optim.lr,data",
  **cli.PROCESS_FLAGS,
}


def parse(argv: Sequence[str]) -> cli.Args:
  """Parses the arguments after the verb."""
  return cli.parse(
    "train",
    FLAGS,
    argv,
    several=("allow_change",),
    description="Pre-trains or fine-tunes a model, as a config says. The same"
    " command, run again, resumes from the last checkpoint.",
    example="vit-jax train --config=vit_b16:imagenet2012 --workdir=runs/b16\n"
    "vit-jax train --config=glyphs --workdir=/tmp/try --fake_data",
  )


def main(argv: Sequence[str]) -> None:
  """Parses the arguments, installs the signal handlers and trains."""
  args = parse(argv)
  run(args, StopSignals(), startup.BEGAN)  # before imports that take seconds


def run(args: cli.Args, signals: StopSignals, began: float) -> None:
  """Joins the other processes, checks the run and trains.

  If the run stops early, the process ends with an exit status of `exit_codes`.

  Args:
    args: Command line.
    signals: Has received the signals since the start of this process.
    began: Start of this process, seconds since the epoch.
  """
  from vit_jax import malloc, run_checks, train
  from vit_jax.callbacks import named, run_lock
  from vit_jax.checkpointing import resume_rules
  from vit_jax.distributed import exit_codes, processes

  config, flags = args.config, args.flags
  workdir = flags["workdir"] or f"runs/{args.config_name}"
  signals.on_exit = run_record.end
  try:
    processes.initialise(
      flags,
      args.errors,
      heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
      stops_on_sigterm=True,
      before_joining=lambda: run_lock.refuse_live(workdir),
    )
    startup.use_cache(workdir)
    malloc.reuse_freed_memory()
    allowed = resume_rules.names_of(flags["allow_change"])
    errors = list(args.errors)
    profile = flags["profile"]
    if profile and (not profile.isdecimal() or int(profile) < 1):
      errors.append(f"--profile: got {profile!r}, expected a step, from 1.")
    if errors:
      named.from_names(config.callbacks, errors)
      run_checks.setup(config, workdir, allow_change=allowed, errors=errors)
    asked = cli.ask(args.source, "get_trials")
    if asked and config.init:
      from vit_jax.finetune import trials

      rounds_of, budget = asked
      if rounds_of:
        signals.on_exit = _on_exit_of_trials()
        config = trials.choose(
          config, rounds_of, budget, workdir, args.overrides
        )
        signals.on_exit = run_record.end
        began = time.time()  # the start of the run is after the trials
      else:
        trials.check_without(config, workdir, allowed)
    train.train_and_evaluate(
      config,
      workdir,
      callbacks=_callbacks(config, workdir, profile, signals),
      allow_change=allowed,
      began=began,
    )
  except Stop as stop:
    exit_codes.restart(f"stopped     {str(stop).removeprefix('stopped ')}")
  except train.EXPECTED_ERRORS as e:
    exit_codes.refuse(str(e))
  except Exception as e:
    exit_codes.end_if_joined(e, config.heartbeat_timeout_seconds)
    raise
  finally:
    signals.close()


def _on_exit_of_trials() -> Callable[[str], None]:
  """Returns the `on_exit` of the trials.

  It prints to the terminal, because sys.stderr is a log file then.
  """
  terminal = sys.stderr

  def end(text: str) -> None:
    run_record.end(text)
    if sys.stderr is not terminal:
      write(terminal, "stopped; the same command continues the trials\n")

  return end


def _callbacks(
  config: Config, workdir: str, profile: str | None, signals: StopSignals
) -> list[Callback]:
  """Returns the callbacks that only the command adds."""
  import jax

  index = jax.process_index()
  watchdog = Watchdog(config.watchdog_seconds, workdir, index, run_record.end)
  if jax.distributed.is_initialized():  # jax receives SIGTERM
    signals.close([signal.SIGINT])
    end_at_once(numbers=[signal.SIGINT])
    callbacks = [Preemption(), watchdog]
  else:
    signals.install()  # libtpu has set handlers of its own
    callbacks = [Preemption(signals), watchdog]
  if profile:
    from vit_jax.callbacks.profile import Profile  # takes seconds to import

    callbacks.append(Profile(f"{workdir}/tensorboard", int(profile)))
  return callbacks
