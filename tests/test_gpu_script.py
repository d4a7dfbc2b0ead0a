"""What a GPU is asked first, and how the answers are told."""

import inspect

import gpu
import jax
import pytest
import timm_speed


def _jobs():
  return list(gpu.jobs(gpu.MODELS, gpu.MICROBATCHES, 20))


def test_the_most_wanted_comes_first_and_can_be_called():
  jobs = _jobs()
  groups = list(dict.fromkeys(job.group for job in jobs))
  assert groups == list(gpu.GROUPS)
  assert len({job.name for job in jobs}) == len(jobs)
  sides = [job.side for job in jobs if job.group == "step"]
  assert sides == ["ours", "timm"] * len(gpu.MODELS)
  batches = {
    job.what["microbatch"] for job in jobs if job.group == "microbatch"
  }
  assert batches == set(gpu.MICROBATCHES)
  for job in jobs:
    assert job.what.get("microbatch", 0) < job.what.get("batch", 1)
    inspect.signature(gpu.SIDES[job.side]).bind(**job.what)


def test_what_takes_too_long_or_fails_is_a_line():
  job = _jobs()[0]
  assert "0 s that were left" in gpu.measured(job, 0.01)["error"]
  unknown = job._replace(flags="--xla_there_is_no_such_flag=1")
  found = gpu.measured(unknown, 60)
  assert "xla_there_is_no_such_flag" in found["error"]
  assert gpu.told({"found": found}).startswith("FAILED: ")


def test_an_error_is_found_in_what_a_process_says():
  said = "Traceback:\n  x\nValueError: first\n\nTraceback:\n  y\n"
  said += "jax.errors.JaxRuntimeError: INTERNAL: cuDNN\nhas no engine\n"
  note = "------\nFor simplicity, JAX has removed its internal frames.\n"
  assert gpu.fault(said).startswith("jax.errors.JaxRuntimeError: INTERNAL:")
  assert "has no engine" in gpu.fault(said)
  assert "cuDNN" in gpu.fault(said + note)
  assert gpu.fault("E1 aborted\n" * 500)[-7:] == "aborted"
  assert gpu.fault("") == ""


def test_an_error_of_cudnn_leaves_the_numbers_of_xla(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # and it is none
  found = gpu.parity([("Ti/16", 32, 4)])
  assert found["error"].startswith("Ti/16, 32 px: cudnn: ")
  assert len(found["Ti/16, 32 px: xla"]) == 4
  assert max(found["Ti/16, 32 px: xla"]) < 0.03


@pytest.mark.parametrize(
  "given, wanted",
  [
    ({}, ("0", "0.92")),
    ({"CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "0.92")),
    ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, ("0", "0.5")),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, ("0", None)),
  ],
)
def test_both_sides_have_one_gpu_and_its_memory(monkeypatch, given, wanted):
  names = "CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION"
  for name in (*names, "XLA_PYTHON_CLIENT_MEM_FRACTION"):
    monkeypatch.delenv(name, raising=False)
  for name, value in given.items():
    monkeypatch.setenv(name, value)
  env = timm_speed.one_gpu()
  assert tuple(map(env.get, names)) == wanted


def test_a_later_call_mends_an_error(tmp_path, monkeypatch, capsys):
  out = tmp_path / "gpu.jsonl"
  monkeypatch.setattr(gpu, "receipt", lambda: {"machine": "m", "commit": "c"})
  monkeypatch.setattr(gpu, "measured", lambda *_: {"error": "no memory"})
  line = ["gpu.py", f"--out={out}", "--tiny", "--only=parity"]
  monkeypatch.setattr("sys.argv", line)
  assert gpu.main()
  monkeypatch.setattr(gpu, "measured", lambda *_: {"cudnn_was_tried": False})
  assert not gpu.main()
  assert len(out.read_text().splitlines()) == 2
  assert "FAILED: no memory" in capsys.readouterr().out
  assert not gpu.main()  # nothing is left to measure
  assert len(out.read_text().splitlines()) == 2


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
  found["attention"] = "XLA (no cuDNN)"
  assert "matrix rate, attention by XLA (no cuDNN), " in gpu.told(
    {"found": found}
  )
