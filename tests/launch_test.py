"""Launchers: what a dry run prints is what is run, and nothing else happens.

No cloud and no cluster is met: where the commands that would meet one are run,
others of their names stand before them in PATH and write down their arguments.
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys

from absl import flags
import pytest
import yaml

from experiments import main

LAUNCH = pathlib.Path(__file__).parent.parent / "experiments" / "launch"
SCRIPTS = sorted(p for p in LAUNCH.iterdir() if p.suffix in {".sh", ".sbatch"})
CONFIG = "configs/jsonl.py:dapo"
# With everything that a shell, YAML, systemd and Kubernetes read as their own.
WORKDIR = """/mnt/share/a run: "it's" $HOME $(x) `y` \\ {z} # & *"""
RUN = {"CONFIG": CONFIG, "WORKDIR": WORKDIR}
TPU = {"NAME": "rl", "ZONE": "us-east5-a"}
SLICE = {"ACCELERATOR": "v5p-32", "RUNTIME": "v2-alpha-tpuv5"}
SOURCE = {
  "SHARE": "10.0.0.2:/runs",
  "REPOSITORY": "https://example.org/x.git",
  "REVISION": "main",
}
GKE = {
  "NAME": "rl",
  "IMAGE": "us-docker.pkg.dev/p/r/groupstd:1",
  "CLAIM": "runs",
  "ACCELERATOR": "tpu-v5p-slice",
  "TOPOLOGY": "2x2x4",
}
SLURM = {"NODES": "4", "GPUS": "8", "CPUS": "12", "TIME": "24:00:00"}

# Command, the variables that it needs, the program that it calls.
CASES = {
  "create": (["tpu_vm.sh", "create"], TPU | SLICE, "gcloud"),
  "status": (["tpu_vm.sh", "status"], TPU, "gcloud"),
  "install": (["tpu_vm.sh", "install"], TPU | SOURCE, "gcloud"),
  "start": (["tpu_vm.sh", "start"], TPU | RUN, "gcloud"),
  "logs": (["tpu_vm.sh", "logs"], TPU, "gcloud"),
  "stop": (["tpu_vm.sh", "stop"], TPU, "gcloud"),
  "delete": (["tpu_vm.sh", "delete"], TPU, "gcloud"),
  "gke": (["gke.sh"], GKE | RUN, "kubectl"),
  "slurm": (["slurm.sh"], SLURM | RUN, "sbatch"),
}
TRAIN = ["start", "gke", "slurm"]


def stand_in(folder, name, code=0):
  """A program that writes its arguments and input to `folder`/NAME.json."""
  path = folder / name
  path.write_text(
    f"#!{sys.executable}\n"
    "import json, sys\n"
    "said = {'arguments': sys.argv[1:], 'input': sys.stdin.read()}\n"
    "json.dump(said, open(sys.argv[0] + '.json', 'w'))\n"
    f"sys.exit({code})\n"
  )
  path.chmod(0o755)


def launch(case, folder, *arguments, without=None, **variables):
  """Runs a case's script from `folder`, where its program is a stand-in."""
  command, needed, program = CASES[case]
  stand_in(folder, program)
  environment = needed | variables | {"PATH": f"{folder}:{os.environ['PATH']}"}
  if without is not None:
    environment.pop(without)
  script, *step = command
  return subprocess.run(
    ["bash", str(LAUNCH / script), *step, *arguments],
    cwd=folder,
    env=environment,
    input="",
    capture_output=True,
    text=True,
  )


def said(folder, name):
  return json.loads((folder / f"{name}.json").read_text())


def unescaped(word):
  """As Kubernetes and systemd read it, where every $ must be $$."""
  assert "$" not in word.replace("$$", "")
  return word.replace("$$", "$")


def started(case, output):
  """The command that hosts run, as printed, read as each layer reads it."""
  if case == "gke":
    job = yaml.safe_load(output)["spec"]["replicatedJobs"][0]["template"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [unescaped(word) for word in container["command"]]
  words = shlex.split(output)
  if case == "start":
    (remote,) = [w for w in words if w.startswith("--command=")]
    words = shlex.split(remote.partition("=")[2])
    words = [unescaped(word) for word in words[words.index("--") + 1 :]]
  return words[words.index("-m") - 1 :]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script):
  subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_prints_what_is_run_and_touches_nothing(case, tmp_path):
  program = CASES[case][2]
  dry = launch(case, tmp_path, "--dry_run", "--config.a=b c")
  assert (dry.returncode, dry.stderr) == (0, "")
  assert [p.name for p in tmp_path.iterdir()] == [program]
  wet = launch(case, tmp_path, "--config.a=b c")
  assert (wet.returncode, wet.stdout, wet.stderr) == (0, "", "")
  ran = said(tmp_path, program)
  if case == "gke":
    first, _, manifest = dry.stdout.partition("\n")
    assert first == "# kubectl apply -f -, of:"
    assert ran == {"arguments": ["apply", "-f", "-"], "input": manifest}
  else:
    assert shlex.split(dry.stdout) == [program, *ran["arguments"]]


@pytest.mark.parametrize("case", TRAIN)
def test_every_launcher_starts_the_one_entry_point(case, tmp_path):
  output = launch(case, tmp_path, "--dry_run", "--config.a=b c").stdout
  _, *words = started(case, output)
  assert words == [
    "-m",
    "experiments.main",
    "--cluster=auto",
    f"--config={CONFIG}",
    f"--workdir={WORKDIR}",
    "--config.a=b c",
  ]


def test_the_flags_are_those_of_the_entry_point():
  own = {
    flag.name for flag in flags.FLAGS.flags_by_module_dict()[main.__name__]
  }
  assert {"cluster", "config", "workdir"} <= own
  assert flags.FLAGS["cluster"].parser.parse("auto") == "auto"


@pytest.mark.parametrize(
  ("case", "name"), [(case, name) for case in CASES for name in CASES[case][1]]
)
def test_a_missing_variable_is_one_line(case, name, tmp_path):
  done = launch(case, tmp_path, "--dry_run", without=name)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith(f"error: {name} is not set: ")
  assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
  ("case", "variables", "message"),
  [
    ("slurm", {"WORKDIR": "runs/own"}, "WORKDIR must begin with /"),
    ("start", {"WORKDIR": "/home/me/own"}, "WORKDIR must be below /mnt/share"),
    ("gke", {"WORKDIR": "/mnt/shared"}, "WORKDIR must be below /mnt/share"),
    ("gke", {"TOPOLOGY": "16"}, "TOPOLOGY must be sides"),
    ("gke", {"TOPOLOGY": "2x3x3"}, "CHIPS=4, of a host, must divide the 18"),
    ("gke", {"CHIPS": "0"}, "CHIPS must be how many chips a host has"),
  ],
)
def test_what_cannot_work_is_one_line(case, variables, message, tmp_path):
  done = launch(case, tmp_path, **variables)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith(f"error: {message}")
  assert done.stderr.count("\n") == 1
  assert not list(tmp_path.glob("*.json"))


def test_a_wrong_step_is_told_the_steps(tmp_path):
  done = subprocess.run(
    ["bash", str(LAUNCH / "tpu_vm.sh"), "begin"],
    env=TPU | {"PATH": os.environ["PATH"]},
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert "create, status, install, start, logs, stop, delete" in done.stderr


@pytest.mark.parametrize(
  ("accelerator", "topology", "hosts"),
  [
    # GKE's tables of multi-host slices, four chips a machine.
    ("tpu-v4-podslice", "2x2x2", 2),
    ("tpu-v5p-slice", "2x2x4", 4),
    ("tpu-v5p-slice", "4x4x8", 32),
    ("tpu-v5-lite-podslice", "4x8", 8),
    ("tpu-v6e-slice", "16x16", 64),
  ],
)
def test_the_job_set_has_a_pod_a_host(accelerator, topology, hosts, tmp_path):
  output = launch(
    "gke", tmp_path, "--dry_run", ACCELERATOR=accelerator, TOPOLOGY=topology
  ).stdout
  (slice_,) = yaml.safe_load(output)["spec"]["replicatedJobs"]
  job = slice_["template"]["spec"]
  pod = job["template"]["spec"]
  (container,) = pod["containers"]
  assert slice_["replicas"] == 1
  assert job["parallelism"] == job["completions"] == hosts
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": accelerator,
    "cloud.google.com/gke-tpu-topology": topology,
  }
  assert container["resources"]["limits"] == {"google.com/tpu": 4}


def test_the_job_set_ends_on_2_and_3_and_starts_again_on_all_else(tmp_path):
  """The chain: exit code -> reason of the Job's failure -> JobSet's action."""
  output = launch("gke", tmp_path, "--dry_run").stdout
  spec = yaml.safe_load(output)["spec"]
  job = spec["replicatedJobs"][0]["template"]["spec"]
  pod = job["template"]["spec"]
  # One pod that fails, of whatever code, fails the Job: BackoffLimitExceeded;
  # but of these codes, PodFailurePolicy, which wants pods that do not restart.
  assert job["backoffLimit"] == 0
  assert pod["restartPolicy"] == "Never"
  (rule,) = job["podFailurePolicy"]["rules"]
  assert rule["action"] == "FailJob"
  assert rule["onExitCodes"] == {
    "containerName": pod["containers"][0]["name"],
    "operator": "In",
    "values": [2, 3],
  }
  # Where no rule matches, a JobSet restarts, at most maxRestarts times.
  (rule,) = spec["failurePolicy"]["rules"]
  assert rule == {
    "action": "FailJobSet",
    "onJobFailureReasons": ["PodFailurePolicy"],
  }
  assert spec["failurePolicy"]["maxRestarts"] > 0


def test_pods_find_each_other_and_the_share(tmp_path):
  spec = yaml.safe_load(launch("gke", tmp_path, "--dry_run").stdout)["spec"]
  pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "rl"}
  (mount,) = container["volumeMounts"]
  (volume,) = pod["volumes"]
  assert mount == {"name": volume["name"], "mountPath": "/mnt/share"}
  assert volume["persistentVolumeClaim"] == {"claimName": "runs"}


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 143])
def test_a_slurm_job_goes_back_into_the_queue_on_75_alone(code, tmp_path):
  stand_in(tmp_path, "srun", code)
  stand_in(tmp_path, "scontrol")
  program = ["python", "-m", "experiments.main", f"--workdir={WORKDIR}"]
  done = subprocess.run(
    ["bash", str(LAUNCH / "slurm.sbatch"), *program],
    env={
      "PATH": f"{tmp_path}:{os.environ['PATH']}",
      "SLURM_JOB_ID": "7",
      "SLURM_CPUS_PER_TASK": "12",
    },
    input="",
    text=True,
  )
  assert done.returncode == code
  arguments = said(tmp_path, "srun")["arguments"]
  assert arguments[-len(program) :] == program
  if code == 75:
    assert said(tmp_path, "scontrol")["arguments"] == ["requeue", "7"]
  else:
    assert not (tmp_path / "scontrol.json").exists()


def test_a_slurm_task_is_a_gpu_and_sees_its_node(tmp_path):
  """As jax gives the task with SLURM_LOCALID i the node's GPU i."""
  words = shlex.split(launch("slurm", tmp_path, "--dry_run").stdout)
  assert "--ntasks-per-node=8" in words
  assert "--gpus-per-node=8" in words
  assert not [w for w in words if w.startswith(("--gpus-per-task", "--gpu-b"))]


def test_every_file_says_that_it_was_not_run():
  for name in "tpu_vm.sh", "gke.sh", "slurm.sh":
    assert "# Not run by us: checked against" in (LAUNCH / name).read_text()
