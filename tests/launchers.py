"""Trains under every launcher that is installed, and prints the table that records/README.md quotes.

    python tests/launchers.py [--only NAME]...

One process is compared with torchrun, mpirun of Open MPI and of MPICH, Slurm's srun, and torchrun on two hosts, which
are network namespaces with a link between them; there, one host is also killed and started again, and the link made
slow. Slurm is started here for the time of the test. With the reference run's data (GOLDEN_PATH), the losses are
compared with the reference's, else with those of one process. The status is 1 if any differs. As root:

    apt-get install openmpi-bin mpich slurmctld slurmd slurm-client munge iproute2
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from conftest import events, make_shards, tiny_arguments  # noqa: E402
from test_golden import GOLDEN, MODEL  # noqa: E402

TRAINER = [sys.executable, str(REPOSITORY / "train_gpt.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HOSTS = {"train-a": "10.77.0.1", "train-b": "10.77.0.2"}  # namespaces and their addresses
LINK = {"train-a": "train-veth-a", "train-b": "train-veth-b"}
SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


class Missing(Exception):
    """What a launch needs and this machine does not have."""


def settings() -> tuple[list[str], dict[str, str], list[float] | None]:
    """The trainer's arguments, its environment, and the reference's losses if its data are here."""
    if not (GOLDEN / "A" / "expected.json").exists() or not MODEL.exists():
        return [], {}, None
    environment = dict(line.split("=", 1) for line in (GOLDEN / "A" / "env").read_text().split())
    arguments = [f"DATA_PATH={GOLDEN / 'ds'}", f"TOKENIZER_PATH={MODEL}", f"INIT_FROM={GOLDEN / 'A' / 'init.pt'}",
                 "TRAIN_LOG_EVERY=1", "DEVICE=cpu", "VAL_LOSS_EVERY=0", "COMPILE=0"]
    return arguments, environment, json.loads((GOLDEN / "A" / "expected.json").read_text())["train_loss"]


def program(*names: str) -> str:
    """The first of some programs that is installed. Raises Missing."""
    for name in names:
        if shutil.which(name):
            return name
    raise Missing(f"{names[0]} is not installed")


def mpirun(flavour: str, ranks: int) -> list[str]:
    name = program(f"mpirun.{flavour}")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if flavour == "openmpi" else []
    return [name, *options, "-n", str(ranks)]


@contextmanager
def slurm(folder: Path):
    """A Slurm of one node, for as long as it is needed. Yields the variables by which srun finds it."""
    for name in ("srun", "slurmctld", "slurmd", "munged"):
        program(name)
    if os.geteuid():
        raise Missing("only root can start Slurm here")
    (folder / "state").mkdir(parents=True)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder, host=socket.gethostname().split(".")[0]))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
    with ExitStack() as stack:
        for command in daemons:
            process = stack.enter_context(subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
            time.sleep(1)
        for _ in range(30):
            listed = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True,
                                    check=False)
            if "idle" in listed.stdout:
                break
            time.sleep(1)
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


@contextmanager
def two_hosts():
    """Two network namespaces with a link between them."""
    program("ip")
    if os.geteuid():
        raise Missing("only root can make network namespaces")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    first, second = LINK.values()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", first, "type", "veth", "peer", "name", second)
        for host, address in HOSTS.items():
            ip("link", "set", LINK[host], "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", LINK[host])
            ip("-n", host, "link", "set", LINK[host], "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def start_host(host: str, folder: Path, arguments: list[str], environment: dict) -> subprocess.Popen:
    """Starts torchrun on one of the two hosts."""
    command = ["ip", "netns", "exec", host, *TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--max-restarts=2",
               "--rdzv-backend=c10d", f"--rdzv-endpoint={HOSTS['train-a']}:29400", f"--local-addr={HOSTS[host]}",
               TRAINER[1], *arguments]
    return subprocess.Popen(command, cwd=folder, env={**environment, "GLOO_SOCKET_IFNAME": LINK[host]}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def run_hosts(folder: Path, arguments: list[str], environment: dict, kill: bool = False) -> None:
    """Trains on both hosts. With `kill`, the second one is killed after the first checkpoint and started again."""
    hosts = {host: start_host(host, folder, arguments, environment) for host in HOSTS}
    if kill:
        while not list(folder.glob("checkpoints/*.pt")):
            time.sleep(0.05)
        os.killpg(hosts["train-b"].pid, 9)
        hosts["train-b"].wait()
        print(f"killed train-b after {sorted(path.name for path in folder.glob('checkpoints/*.pt'))[-1]}", flush=True)
        hosts["train-b"] = start_host("train-b", folder, arguments, environment)
    outputs = [process.communicate(timeout=600)[0] for process in hosts.values()]
    for process, output in zip(hosts.values(), outputs):
        if process.returncode:
            raise RuntimeError(output[-2000:])


def losses(folder: Path) -> dict[int, float]:
    """The training losses of a run by step; a resumed run has several logs."""
    found = {}
    for path in sorted((folder / "logs").glob("run*.jsonl"), key=lambda path: path.stat().st_mtime):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found |= {event["step"]: event["train_loss"] for event in lines if event["event"] == "train"}
    return found


def step_ms(folder: Path) -> float:
    """The mean milliseconds of a step after the second, from the run's last log."""
    steps = [event for event in events(folder, "run") if event["event"] == "train"]
    return (steps[-1]["train_time_ms"] - steps[1]["train_time_ms"]) / (steps[-1]["step"] - steps[1]["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="part of the names of the launches to try")
    options = parser.parse_args()
    arguments, variables, expected = settings()
    failed = False
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        root = Path(place)
        if not arguments:
            arguments = tiny_arguments(make_shards(root), ITERATIONS=12, VAL_LOSS_EVERY=0)
        plain = {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM")}, **variables}
        rows = []
        digests = {}

        def launch(name: str, run) -> None:
            """Trains by run(folder, arguments), and adds a row about it to the table."""
            nonlocal expected, failed
            if options.only and name != "python" and not any(part in name for part in options.only):
                return
            folder = root / name.replace(" ", "_")
            folder.mkdir()
            started = time.monotonic()
            try:
                run(folder, [*arguments, "RUN_ID=run"])
            except Missing as reason:
                rows.append([name, "", "", "", str(reason)])
                return
            except (RuntimeError, subprocess.SubprocessError) as error:
                failed = True
                rows.append([name, "", "", "", "FAILED"])
                print(f"{name}: {error}", file=sys.stderr)
                return
            found = losses(folder)
            values = [found[step] for step in sorted(found)]
            expected = expected or values
            differences = [abs(a - b) for a, b in zip(values, expected, strict=True)]
            agrees = max(differences[:5]) <= 3e-4 and max(differences) <= 2e-3
            failed |= not agrees
            digests[name] = hashlib.sha256((folder / "final_model.int8.ptz").read_bytes()).hexdigest()[:12]
            rows.append([name, f"{max(differences[:5]):.1e}", f"{max(differences):.1e}", f"{step_ms(folder):.0f}",
                         "agrees" if agrees else "DIFFERS"])
            print(f"{name}: {time.monotonic() - started:.0f} s, artifact {digests[name]}", flush=True)

        def direct(prefix, **more):
            """A launch by a command in front of the trainer's."""
            def run(folder, words):
                command = [*(prefix() if callable(prefix) else prefix), *TRAINER[bool(more.get("torchrun")):], *words]
                result = subprocess.run(command, cwd=folder, env={**plain, **more.get("environment", {})}, text=True,
                                        capture_output=True, timeout=900, check=False)
                if result.returncode:
                    raise RuntimeError((result.stderr or result.stdout)[-2000:])
            return run

        launch("python", direct([]))
        for ranks in (2, 4):
            torchrun = [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"]
            launch(f"torchrun, {ranks} ranks", direct(torchrun, torchrun=True))
            for flavour, title in (("openmpi", "Open MPI"), ("mpich", "MPICH")):
                launch(f"mpirun of {title}, {ranks} ranks", direct(lambda f=flavour, n=ranks: mpirun(f, n)))

        def with_slurm(folder, words):
            found = stack.enter_context(slurm(root / "slurm"))
            direct(["srun", "--mpi=none", "-n", "2"], environment=found)(folder, words)

        launch("srun, 2 ranks", with_slurm)

        def on_hosts(**how):
            def run(folder, words):
                if not Path("/run/netns/train-a").exists():
                    stack.enter_context(two_hosts())
                if how.get("slow"):
                    subprocess.run(["tc", "-n", "train-a", "qdisc", "add", "dev", LINK["train-a"], "root", "netem",
                                    "delay", "10ms", "rate", "100mbit"], check=True)
                if how.get("kill"):
                    words = [*words, "CHECKPOINT_EVERY=5", "RESUME=auto"]
                run_hosts(folder, words, plain, how.get("kill", False))
            return run

        launch("two hosts", on_hosts())
        launch("two hosts, one killed and started again", on_hosts(kill=True))
        launch("two hosts, 10 ms and 100 Mbit/s apart", on_hosts(slow=True))
        both = [digests.get(name) for name in ("two hosts", "two hosts, one killed and started again")]
        if all(both):
            failed |= both[0] != both[1]
            print(f"artifact of the killed run: {'identical' if both[0] == both[1] else 'DIFFERENT'}")
    print("\n| launch | largest difference of the first 5 losses | of all | ms a step | |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
