"""The recipes in launch/: their commands, what they do with a signal and a status, and a run on two nodes."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from medusa_k25.checkpoint import complete_checkpoints
from tests.tiny import cache_of

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
RECIPES = ("single_node.sh", "multi_node.sh", "slurm.sbatch", "hero_run.sh")
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}


def start(recipe: str, cwd: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """A recipe in a process group of its own, with nothing in its environment but PATH and `env`; stderr to stdout."""
    return subprocess.Popen(
        ["bash", LAUNCH / recipe, *arguments],
        cwd=cwd,
        env={"PATH": f"{cwd / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(recipe: str, cwd: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """(status, output)"""
    process = start(recipe, cwd, *arguments, **env)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def stub(cwd: Path, name: str, script: str) -> None:
    """A program that appends its arguments to the file `calls` in `cwd` and then does as the script says."""
    path = cwd / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>calls\n{script}\n')
    path.chmod(0o755)


def calls(cwd: Path) -> list[str]:
    file = cwd / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        time.sleep(0.01)


def test_shellcheck_finds_no_fault():
    files = [path for path in sorted(LAUNCH.iterdir()) if path.suffix in (".sh", ".sbatch")]
    assert {*RECIPES} < {path.name for path in files}
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    found = subprocess.run([shellcheck, "-x", *files], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_to_expect(recipe):
    lines = (LAUNCH / recipe).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and os.access(LAUNCH / recipe, os.X_OK) == recipe.endswith(".sh")
    assert "set -euo pipefail" in lines
    block = " ".join(line.removeprefix("#") for line in lines[1 : lines.index("set -euo pipefail")])
    for words in (f"launch/{recipe}", "DRY_RUN=1", "Expected for Kimi-K2.5", "estimates", "minutes", " 75 "):
        assert words in block


TORCHRUN = f"OMP_NUM_THREADS=1 python3 {LAUNCH}/agent.py"
ONE_NODE = f"{TORCHRUN} --standalone --nproc-per-node 8 -m medusa_k25.train"
NODE_1 = (
    f"{TORCHRUN} --nnodes 2 --node-rank 1 --nproc-per-node 8 --rdzv-backend static --master-addr node0"
    " --master-port 29500 --rdzv-conf timeout=900 -m medusa_k25.train"
)
SRUN = "OMP_NUM_THREADS=1 srun --kill-on-bad-exit=0 --wait=120 --cpus-per-task=8 python3 -m medusa_k25.train"
VERB = "python3 -m medusa_k25"


@pytest.mark.parametrize(
    ("recipe", "env", "expected"),
    [
        (
            "single_node.sh",
            {},
            [f"{ONE_NODE} +exp=k25_4heads trainer.num_nodes=1 trainer.devices=8 cache=c x='[1, 2]'"],
        ),
        (
            "single_node.sh",
            {"EXP": "mine", "PYTHON": "py", "OMP_NUM_THREADS": "4", "GPUS_PER_NODE": "2"},
            [
                f"OMP_NUM_THREADS=4 py {LAUNCH}/agent.py --standalone --nproc-per-node 2 -m medusa_k25.train "
                "+exp=mine trainer.num_nodes=1 trainer.devices=2 cache=c x='[1, 2]'"
            ],
        ),
        (
            "multi_node.sh",
            TWO_NODES,
            [f"{NODE_1} +exp=k25_nvl8_multinode trainer.num_nodes=2 trainer.devices=8 cache=c x='[1, 2]'"],
        ),
        ("slurm.sbatch", {}, [f"{SRUN} +exp=k25_4heads trainer.num_nodes=1 trainer.devices=8 cache=c x='[1, 2]'"]),
        (
            "slurm.sbatch",
            {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "6"},
            [f"{SRUN} +exp=k25_nvl8_multinode trainer.num_nodes=4 trainer.devices=6 cache=c x='[1, 2]'"],
        ),
    ],
)
def test_a_dry_run_prints_the_command(tmp_path, recipe, env, expected):
    env = {"GPUS_PER_NODE": "8", "DRY_RUN": "1", **env}
    status, out = run(recipe, tmp_path, "cache=c", "x=[1, 2]", **env)
    assert status == 0
    assert [shlex.split(line) for line in out.splitlines()] == [shlex.split(line) for line in expected]


def test_a_dry_run_of_everything(tmp_path):
    status, out = run("hero_run.sh", tmp_path, "seed=2", "target=x", CACHE="c", GPUS_PER_NODE="8", DRY_RUN="1")
    assert status == 0
    assert out.splitlines() == [
        f"{VERB}.inspect +exp=k25_4heads name=k25_4heads cache=c verify=full target=x",
        "# train",
        f"{ONE_NODE} +exp=k25_4heads trainer.num_nodes=1 trainer.devices=8 name=k25_4heads cache=c seed=2 target=x",
        f"{VERB}.evaluate +exp=k25_4heads name=k25_4heads cache=c seed=2 target=x",
        f"{VERB}.export +exp=k25_4heads name=k25_4heads cache=c seed=2 target=x",
    ]
    assert not (tmp_path / "runs").exists()
    options = {"CACHE": "c", "NAME": "n", "GPUS_PER_NODE": "8", "DRY_RUN": "1", **TWO_NODES}
    assert run("hero_run.sh", tmp_path, **options) == (
        0,
        NODE_1.replace("timeout=900", "timeout=14400")
        + " +exp=k25_nvl8_multinode trainer.num_nodes=2 trainer.devices=8 name=n cache=c\n",
    )
    status, out = run("hero_run.sh", tmp_path, **options | {"NODE_RANK": "0"})
    assert [line.split()[2] for line in out.splitlines() if not line.startswith("#")] == [
        "medusa_k25.inspect",
        f"{LAUNCH}/agent.py",
        "medusa_k25.evaluate",
        "medusa_k25.export",
    ]


def test_the_fabric_adds_nccl_settings_and_leaves_yours(tmp_path):
    def settings(**env: str) -> dict[str, str]:
        status, out = run("multi_node.sh", tmp_path, DRY_RUN="1", GPUS_PER_NODE="8", **TWO_NODES | env)
        assert status == 0
        return dict(word.split("=", 1) for word in shlex.split(out) if word.startswith("NCCL_"))

    rdma = [path.name for path in Path("/sys/class/infiniband").glob("*")]
    assert settings() == {}
    assert settings(FABRIC="pcie") == {"NCCL_DEBUG": "WARN"} | ({} if rdma else {"NCCL_NET": "Socket"})
    mlx = any(name.startswith("mlx5_") for name in rdma)
    assert settings(FABRIC="nvl8") == {"NCCL_DEBUG": "WARN"} | ({"NCCL_NET": "IB"} if mlx else {})
    mine = {"NCCL_DEBUG": "INFO", "NCCL_NET": "mine", "NCCL_IB_HCA": "=mlx5_0"}
    assert settings(FABRIC="pcie", **mine) == settings(FABRIC="nvl8", **mine) == mine


@pytest.mark.parametrize(
    ("recipe", "arguments", "env", "message"),
    [
        ("single_node.sh", [], {"FABRIC": "nvlink"}, "FABRIC=nvlink: expected pcie"),
        ("single_node.sh", [], {}, "nvidia-smi lists no GPU"),
        ("multi_node.sh", [], {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is needed"),
        ("hero_run.sh", [], {}, "CACHE=FOLDER is needed"),
        ("hero_run.sh", ["run_dir=x"], {"CACHE": "c"}, "run_dir=x: set NAME and CACHE"),
    ],
)
def test_a_wrong_command_is_refused(tmp_path, recipe, arguments, env, message):
    stub(tmp_path, "nvidia-smi", "exit 9")
    status, out = run(recipe, tmp_path, *arguments, **env)
    assert status == 2 and out.startswith("error: ") and message in out


# Each verb leaves what the real one leaves, or ends with the status in the file of its name.
VERBS = """
for word in "$@"; do
    case $word in
    medusa_k25.*) verb=${word#medusa_k25.} ;;
    esac
done
if [[ -f $verb ]]; then exit "$(<"$verb")"; fi
case $verb in
inspect) touch runs/n/report.json ;;
train) if [[ ! -f runs/n/checkpoints/step-1/heads.json ]]; then
    mkdir -p runs/n/checkpoints/step-1; touch runs/n/checkpoints/step-1/heads.json
fi ;;
evaluate) touch runs/n/report.html ;;
export) mkdir -p runs/n/export ;;
esac
"""


@pytest.fixture
def hero(tmp_path):
    """(overrides...) -> (status, verbs that ran) of hero_run.sh with a stub of Python."""
    stub(tmp_path, "python3", VERBS)
    (tmp_path / "c/index").mkdir(parents=True)

    def main(*overrides: str) -> tuple[int, list[str]]:
        status, _ = run("hero_run.sh", tmp_path, *overrides, CACHE="c", NAME="n", GPUS_PER_NODE="1")
        verbs = [word for call in calls(tmp_path) for word in call.split() if word.startswith("medusa_k25.")]
        return status, [verb.removeprefix("medusa_k25.") for verb in verbs]

    return main


def test_the_hero_run_does_what_is_left_to_do(hero, tmp_path):
    everything = ["inspect", "train", "evaluate", "export"]
    assert hero() == (0, everything)
    assert hero() == (0, ["train"])  # which knows by itself
    time.sleep(0.02)  # file times have the resolution of the kernel's tick
    (tmp_path / "runs/n/checkpoints/step-1/heads.json").touch()  # trained on
    assert hero() == (0, ["train", "evaluate", "export"])
    time.sleep(0.02)
    (tmp_path / "c/index/main.jsonl").touch()  # the cache has grown
    assert hero() == (0, everything)
    assert hero("num_nodes=5") == (0, ["train", "evaluate", "export"])
    assert hero("num_nodes=5") == (0, ["train"])
    assert hero("num_nodes=5", "target=other") == (0, everything)
    assert hero("num_nodes=5", "target=other") == (0, ["train"])
    (tmp_path / "runs/n/export").rmdir()
    assert hero("num_nodes=5", "target=other") == (0, ["train", "export"])


@pytest.mark.parametrize("status", [1, 75])
@pytest.mark.parametrize("verb", ["inspect", "train", "evaluate", "export"])
def test_the_hero_run_stops_at_a_failure_and_goes_on_there(hero, tmp_path, verb, status):
    everything = ["inspect", "train", "evaluate", "export"]
    at = everything.index(verb)
    (tmp_path / verb).write_text(str(status))
    assert hero() == (status, everything[: at + 1])
    (tmp_path / verb).unlink()
    again = everything[at:]
    assert hero() == (0, again if "train" in again else ["train", *again])


SAVES_AND_STOPS = "trap 'kill $!; exit 75' USR1\ntouch ready\nsleep 60 &\nwait"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("recipe", ["hero_run.sh", "single_node.sh", "slurm.sbatch"])
def test_a_signal_reaches_the_training(tmp_path, recipe, how):
    """As USR1 or, from a recipe that has become the training, as it came."""
    stub(tmp_path, "python3", f'[[ "$*" != *train* ]] || {{\n{SAVES_AND_STOPS.replace("USR1", "USR1 TERM")}\n}}')
    stub(tmp_path, "srun", SAVES_AND_STOPS)
    stub(tmp_path, "scontrol", "")
    (tmp_path / "c").mkdir()
    process = start(recipe, tmp_path, CACHE="c", NAME="n", GPUS_PER_NODE="1", SLURM_JOB_ID="17")
    wait_for((tmp_path / "ready").exists, "the training", 30)
    process.send_signal(how)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75, out
    assert ("scontrol requeue 17" in calls(tmp_path)) == (recipe == "slurm.sbatch")


@pytest.mark.parametrize("status", [0, 1, 137])
def test_slurm_requeues_only_what_asks_for_it(tmp_path, status):
    stub(tmp_path, "srun", f"exit {status}")
    stub(tmp_path, "scontrol", "")
    assert run("slurm.sbatch", tmp_path, "cache=c", SLURM_JOB_ID="17")[0] == status
    assert [call.split()[0] for call in calls(tmp_path)] == ["srun"]


def test_slurm_is_told_to_signal_the_script_alone():
    """Slurm's own TERM or USR1 to the tasks would also reach what they have started, such as data loaders."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    wanted = ("--signal=B:USR1@180", "--requeue", "--open-mode=append")
    assert {f"#SBATCH {option}" for option in wanted} <= {*lines}


WORKER = """
import os, signal, sys, time
from pathlib import Path

def save_and_stop(number, frame):
    time.sleep(0.3)
    sys.exit(75)

signal.signal(signal.SIGTERM, save_and_stop)
signal.signal(signal.SIGUSR1, save_and_stop)
rank = os.environ["RANK"]
Path(f"ready{rank}").touch()
if sys.argv[1] == "wait" or rank == "0":
    time.sleep(60)
while not Path("ready0").exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("worker", "how", "status"),
    [
        ("75", None, 75),
        ("3", None, 3),  # though the other one, stopped by the agent, ends with 75
        ("wait", signal.SIGTERM, 75),
        ("wait", signal.SIGUSR1, 75),
    ],
)
def test_the_agent_ends_with_the_status_of_its_workers(tmp_path, worker, how, status):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, LAUNCH / "agent.py", "--standalone", "--nproc-per-node", "2", "worker.py", worker]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if how is not None:
        wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2, "the workers", 60)
        process.send_signal(how)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == status, out


@pytest.fixture
def two_nodes(tiny_k25, tmp_path):
    """() -> two recipes on loopback, each a node with one process that trains on the CPU; nothing of them is left."""
    cache = cache_of(tiny_k25, tmp_path / "cache", num_documents=24)
    overrides = [
        "target=tiny_k25",
        f"target.home={tiny_k25.path.parent}",
        f"cache={cache.path}",
        "trainer=cpu",
        "trainer.accelerator=cpu",
        "trainer.max_steps=200",
        "trainer.val_check_interval=20",
        "data.window=16",
        "data.batch_size=2",
        "draft_vocab_size=300",
        "num_nodes=5",
    ]
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> list[subprocess.Popen[bytes]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {
            **os.environ,
            "NNODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GPUS_PER_NODE": "1",
            "EXP": "smol_4heads",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        nodes = []
        for rank in range(2):
            with (tmp_path / f"out{rank}").open("wb") as out:
                nodes.append(
                    subprocess.Popen(
                        [LAUNCH / "multi_node.sh", *overrides],
                        cwd=tmp_path,
                        env=env | {"NODE_RANK": str(rank)},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        started.extend(nodes)
        return nodes

    yield begin
    for node in started:
        kill_node(node)


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """The recipe, which has become the agent, and its workers, as a power cut would."""
    workers: list[str] = []
    with suppress(FileNotFoundError):
        workers = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    node.kill()
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)
    node.wait()


def test_a_node_that_is_lost_ends_the_run_and_the_same_command_goes_on(two_nodes, tmp_path):
    checkpoints = tmp_path / "runs/smol_4heads/checkpoints"
    nodes = two_nodes()
    wait_for(lambda: complete_checkpoints(checkpoints) or any(node.poll() for node in nodes), "a checkpoint")
    kill_node(nodes[1])
    assert nodes[0].wait(timeout=30) == 1, (tmp_path / "out0").read_text()  # it took 3 s where this was written
    last = complete_checkpoints(checkpoints)[-1].name
    assert last < "step-000200"

    (checkpoints / "step-000199.part").mkdir()  # half written: never chosen
    written = len((checkpoints.parent / "metrics.csv").read_text().splitlines())
    nodes = two_nodes()
    wait_for(lambda: len((checkpoints.parent / "metrics.csv").read_text().splitlines()) > written, "a further step")
    nodes[1].terminate()  # one is enough
    assert [node.wait(timeout=120) for node in nodes] == [75, 75], (tmp_path / "out1").read_text()
    stopped = complete_checkpoints(checkpoints)[-1].name
    assert last < stopped < "step-000200"

    nodes = two_nodes()
    assert [node.wait(timeout=120) for node in nodes] == [0, 0], (tmp_path / "out0").read_text()
    out = [(tmp_path / f"out{rank}").read_text() for rank in range(2)]
    assert "x 2 ranks x" in out[0] and stopped in out[0]
    assert "MEMBER: 2/2" in out[1]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["smol_4heads"]
    assert complete_checkpoints(checkpoints)[-1].name == "step-000200"
    rows = [line.split(",")[:2] for line in (checkpoints.parent / "metrics.csv").read_text().splitlines()[1:]]
    losses = [int(step) for step, metric in rows if metric == "train/loss_head1"]
    assert losses == list(range(10, 201, 10))  # one rank writes, and no step is there twice


def test_the_pilot_draws_its_prompts_and_trains_on_nested_shares(tmp_path):
    stub(tmp_path, "python3", "")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(1000)))
    env = {"PROMPTS": "prompts.jsonl", "SERVER": "http://s", "SAMPLES": "50", "GPUS_PER_NODE": "1", "NAME": "p"}
    status, out = run("pilot.sh", tmp_path, "hardware=h200_x8", **env)
    assert status == 0, out
    generate, capture, *trained, plan = (shlex.split(call) for call in calls(tmp_path))
    for call, verb in ((generate, "generate"), (capture, "capture")):
        assert call[2] == f"medusa_k25.{verb}"
        assert {"server=http://s", "prompts=runs/p/prompts.jsonl", "name=p", "hardware=h200_x8"} <= {*call}
    for call, share, steps in zip(trained, ("0.25", "0.5", "1"), (50, 100, 200), strict=True):
        wanted = {f"name=p-{share}", f"data.share={share}", f"trainer.max_steps={steps}", "cache=runs/p/cache"}
        assert wanted | {f"trainer.val_check_interval={steps // 5}", "hardware=h200_x8"} <= {*call}
    assert {"medusa_k25.plan", "pilot=[runs/p-0.25,runs/p-0.5,runs/p-1]"} <= {word.replace("\\", "") for word in plan}

    drawn = (tmp_path / "runs/p/prompts.jsonl").read_text().splitlines()
    assert len({*drawn}) == 50
    assert {*drawn} < {*(tmp_path / "prompts.jsonl").read_text().splitlines()}
    assert 300 < sum(int(line[7:-1]) for line in drawn) / 50 < 700  # not the first ones
    (tmp_path / "prompts.jsonl").write_text("")  # they are drawn once
    assert run("pilot.sh", tmp_path, **env)[0] == 0
    assert (tmp_path / "runs/p/prompts.jsonl").read_text().splitlines() == drawn


def test_the_pilot_ends_with_the_status_of_what_failed(tmp_path):
    stub(tmp_path, "python3", "[[ $* != *medusa_k25.train* ]] || exit 75")
    status, _ = run("pilot.sh", tmp_path, CACHE="c", GPUS_PER_NODE="1")
    assert status == 75
    assert len(calls(tmp_path)) == 1  # neither generated, nor captured, nor planned
    for arguments, env, message in (
        ([], {}, "PROMPTS=FILE.jsonl is needed"),
        (["data.share=1"], {"CACHE": "c"}, "data.share=1: set NAME, CACHE and STEPS"),
        ([], {"CACHE": "c", "STEPS": "8"}, "STEPS=8: expected at least 20"),
    ):
        status, out = run("pilot.sh", tmp_path, *arguments, **env)
        assert status == 2 and message in out
    status, out = run("pilot.sh", tmp_path, CACHE="c", GPUS_PER_NODE="1", DRY_RUN="1")
    assert status == 0 and len(out.splitlines()) == 4 and not calls(tmp_path)
