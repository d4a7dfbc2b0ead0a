"""What a GPU is asked first, and how the answers are told."""

import inspect

import gpu


def _jobs():
  return list(gpu.jobs(gpu.MODELS, gpu.MICROBATCHES, 20))


def test_the_most_wanted_comes_first_and_can_be_called():
  jobs = _jobs()
  groups = list(dict.fromkeys(job.group for job in jobs))
  assert groups == list(gpu.GROUPS)
  assert len({job.name for job in jobs}) == len(jobs)
  sides = [job.side for job in jobs if job.group == "step"]
  assert sides == ["ours", "timm"] * len(gpu.MODELS)
  for job in jobs:
    inspect.signature(gpu.SIDES[job.side]).bind(**job.what)


def test_what_takes_too_long_or_fails_is_a_line():
  job = _jobs()[0]
  assert "0 s that were left" in gpu.measured(job, 0.01)["error"]
  unknown = job._replace(flags="--xla_there_is_no_such_flag=1")
  found = gpu.measured(unknown, 60)
  assert "xla_there_is_no_such_flag" in found["error"]
  assert gpu.told({"found": found}).startswith("FAILED: ")


def test_steps_are_compared_with_timms():
  def line(name, rate):
    return {
      "group": "step",
      "name": name,
      "found": {"images_per_second": rate} if rate else {"error": "no timm"},
    }

  lines = [line("B/16: ours", 300.0), line("B/16: timm", 200.0)]
  lines += [line("L/16: ours", 100.0), line("L/16: timm", None)]
  assert list(gpu.ratios(lines)) == ["B/16: 1.50 times timm's images/s"]
  found = {"images_per_second": 300.0, "mfu": 0.6, "compile_seconds": 4.0}
  assert gpu.told({"found": found}) == (
    "300.0 images/s, 60.0 % of the measured matrix rate, compiled in 4 s"
  )
