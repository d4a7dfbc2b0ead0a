"""VTAB-1k: 19 tasks of 1,000 training images each (arXiv:2010.11929, 4.1).

Run, all tasks, one table: vit-jax sweep --workdir=runs/vtab \
  --config=vtab:task=all,init=ViT-B_16.npz,model=B/16
One task: vit-jax sweep --workdir=runs/dtd \
  --config=vtab:task=dtd,init=ViT-B_16.npz,model=B/16
Arguments: task (of TASKS; for vit-jax sweep also all, natural, specialized or
structured), init (anything that vit_jax.load reads), model (any that vit-jax
models prints), res (pixels, rounded to a multiple of the patch; 384 for every
task, as in the paper).
For every task, options are chosen with 800 training images and 200 validation
images. Then the model is trained on all 1,000 and scored once on the whole test
split (vit-jax train makes one run on the 800). The slices are those of the
benchmark, see vit_jax/data/vtab.py. Tasks whose data are not on disk are
refused; with --available they are left out, and the means state their number of
tasks. --against=runs/vtab compares the records and scores of a second run with
those of the first.

From the paper: 2,500 steps of 512 images, SGD, momentum 0.9, learning rate
0.01, cosine, no weight decay, clipping at 1, a zero head, 384 px; images as in
BiT (arXiv:1912.11370): resized to 7/6 of the size, cropped, flipped.
Choices that the paper leaves open:
- Grid: the paper tried two learning rates and two lengths for all tasks, and
  states the chosen ones, which are the only point of the grid. For AugReg's
  search per task (arXiv:2106.10270) add --grid=total_steps=500,2500
  --grid=optim.lr=0.001,0.003,0.01,0.03.
- Warm-up: 200 steps, as in AugReg.
- The last training has all 1,000 images, which the paper implies.
- Crop and flip are left out if they change the label, which is BiT's rule. BiT
  does not list the tasks; here they are the structured ones and SVHN.
TFDS no longer builds the version of oxford_iiit_pet that VTAB uses, so its
slices may have other images. diabetic_retinopathy and resisc45 must be
downloaded by hand.

Cost, an estimate of vit-jax plan, which no chip has confirmed: B/16 on 8 chips
of TPU v5e takes 266 ms per step and 11 minutes per training; all tasks, each
trained twice, take 7.0 hours or 56 chip-hours, without scoring.
Result: not yet run. The paper's Table 9, top-1 in %, in the order of TASKS:
  H/14 JFT  95.3 85.5 75.2 99.7 97.2 65.0 88.9 | 83.3 96.7 91.4 76.6 |
            91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2: mean 77.6
  L/16 JFT  95.4 81.9 74.3 99.7 96.7 63.5 87.4 | 83.6 96.5 89.7 77.1 |
            86.4 63.1 49.7 74.5 60.5 82.2 36.2 51.1: mean 76.3
  L/16 21k  90.8 84.1 74.1 99.3 92.7 61.0 80.9 | 82.5 95.6 85.2 75.3 |
            70.3 56.1 41.9 74.7 64.9 79.9 30.5 41.7: mean 72.7
"""

from vit_jax.config import arguments, defaults, whole_number
from vit_jax.data.vtab import PREFIX, STRUCTURED, TASKS
from vit_jax.families import by_variant, family
from vit_jax.options import nearest

ARGUMENTS = {"task": "caltech101", "init": "", "model": "B/16", "res": "384"}
NO_CROP = ("svhn", *(k for k, v in TASKS.items() if v.group == STRUCTURED))


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  task = args["task"]
  if task not in TASKS:
    groups = _groups()
    raise ValueError(
      f"got task={task}, expected one of {', '.join(TASKS)}; or, for"
      f" vit-jax sweep alone, {', '.join(groups)}."
      + nearest(task, {*TASKS, *groups} - {task})
    )
  stride = by_variant(args["model"]).stride
  res = max(1, round(whole_number(args, "res") / stride)) * stride

  c = defaults()
  c.init = args["init"] or None
  c.model.variant = args["model"]
  c.model.name = family(args["model"])
  c.model.dtype = "bfloat16"
  c.data.dataset, c.data.split = PREFIX + task, "train800"
  c.data.batch_size = 512
  if task in NO_CROP:
    c.data.ops = f"decode|resize({res})"
  else:
    c.data.ops = f"decode|resize({res * 7 // 6})|random_crop({res})|flip_lr"
  c.total_steps = 2500
  c.mesh.fsdp = -1  # the state is split over up to 16 chips
  c.optim.microbatch = 16  # of each
  c.optim.name = "sgd"
  c.optim.momentum = 0.9
  c.optim.lr = 0.01
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 200
  c.optim.clip_norm = 1.0
  c.checkpoint.every_steps = 500
  score = {"kind": "classification", "ops": f"decode|resize({res})"}
  c.evals = {
    "test": {**score, "split": "test"},
    "val": {**score, "split": "val200", "every_steps": 500},
  }
  return c


def get_grid(arg: str = ""):
  """What vit-jax sweep tries, unless --grid says otherwise."""
  return {"optim.lr": (0.01,)}


def get_tasks(arg: str = ""):
  """The tasks of vit-jax sweep: name -> (group, argument); {} for one."""
  args = arguments(arg, ARGUMENTS)
  tasks = {}
  for name in _groups().get(args["task"], ()):
    of_task = {**args, "task": name}
    argument = ",".join(f"{k}={v}" for k, v in of_task.items())
    tasks[name] = TASKS[name].group, argument
  return tasks


def _groups() -> dict[str, list[str]]:
  groups = {"all": list(TASKS)}
  for name, task in TASKS.items():
    groups.setdefault(task.group, []).append(name)
  return groups
