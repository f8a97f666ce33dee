"""The examples of other tools run on two processes, and do what their page says (`make integrations`)."""

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from samestep.rendezvous.listen import hold_port

SCRIPTS = Path(__file__).parents[1] / "examples" / "integrations"
BIN = Path(sys.executable).parent


def run(directory: Path, *command: object, **variables: str) -> str:
    """What a command prints; it has to end well."""
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "WANDB_SILENT": "true",
        **variables,
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=directory, env=env, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    return done.stdout


def on(size: int, directory: Path, script: str, *args: object) -> str:
    return run(directory, BIN / "samestep", "run", "-n", size, SCRIPTS / script, *args)


def test_tensorboard_gets_one_value_for_each_step_from_rank_0_alone(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on(2, tmp_path, "tensorboard_log.py")
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(file)).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(7))


def test_wandb_makes_one_offline_run(tmp_path: Path) -> None:
    on(2, tmp_path, "wandb_offline.py")
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_mlflow_gets_one_run_with_one_value_for_each_step(tmp_path: Path) -> None:
    on(2, tmp_path, "mlflow_log.py")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        steps = store.execute("SELECT step FROM metrics WHERE key = 'loss' ORDER BY step").fetchall()
    assert steps == [(step,) for step in range(7)]


def test_a_stateful_loader_goes_on_where_its_state_says(tmp_path: Path) -> None:
    for size in (1, 2):
        theirs, ours = on(size, tmp_path, "stateful_loader.py").splitlines()
        assert theirs.removeprefix("torchdata ") == ours.removeprefix("samestep  ") == "[6, 22, 38, 54, 70]"


@pytest.mark.timeout(180)  # three runs
def test_graphs_of_pytorch_geometric_train_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    alone, two, three = (on(size, tmp_path, "pyg_graphs.py") for size in (1, 2, 3))
    assert alone == two == three
    assert alone.count("loss") == 3


@pytest.mark.skipif(not find_spec("timm") or not find_spec("torchvision"), reason="timm needs torchvision")
def test_a_model_of_timm_trains_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    alone, shared = (on(size, tmp_path, "timm_model.py") for size in (1, 2))
    assert alone == shared
    assert alone.count("loss") == 3


@pytest.mark.timeout(120)  # two runs, each with a start of its own
@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("torchmetrics_eval.py", ()),
        ("huggingface.py", ()),
        ("webdataset_read.py", ()),
        ("omegaconf_config.py", ["lr=0.2"]),
        ("hydra_app.py", ["lr=0.2"]),
    ],
)
def test_a_script_with_the_tool_prints_the_same_on_one_process_and_on_two(
    tmp_path: Path, script: str, args: list[str]
) -> None:
    printed = [on(size, tmp_path, script, *args) for size in (1, 2)]
    assert re.search(r"\d\.\d{4}", printed[0])
    assert printed[0] == printed[1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def connected(port: int, until_s: float = 30.0) -> socket.socket:
    """A connection to a server of this machine that is still starting."""
    end = time.monotonic() + until_s
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=until_s)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.timeout(120)
def test_an_s3_server_gets_the_weights_of_each_epoch(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1"}
    server = subprocess.Popen(
        [BIN / "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        connected(port).close()
        command = (BIN / "samestep", "run", "-n", 2, SCRIPTS / "fsspec_copy.py", "s3://bucket/run-7")
        env = {**keys, "AWS_ENDPOINT_URL": url, "FSSPEC_S3_ENDPOINT_URL": url}
        make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
        run(tmp_path, sys.executable, "-c", make, **env)
        assert run(tmp_path, *command, **env) == "['epoch-0.pt', 'epoch-1.pt']\n"
        read = "import s3fs, sys; sys.stdout.buffer.write(s3fs.S3FileSystem().cat('bucket/run-7/epoch-1.pt'))"
        done = subprocess.run(
            [sys.executable, "-c", read], env=os.environ | env, capture_output=True, timeout=50
        )
        assert done.stdout == (tmp_path / "model.pt").read_bytes()
    finally:
        server.terminate()
        server.wait()


@pytest.mark.timeout(120)
def test_fsspec_gets_the_weights_of_each_epoch_once(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for store in ("memory://store", f"file://{tmp_path}/store"):
        assert on(2, tmp_path, "fsspec_copy.py", store) == "['epoch-0.pt', 'epoch-1.pt']\n"
    assert (tmp_path / "store" / "epoch-1.pt").read_bytes() == (tmp_path / "model.pt").read_bytes()


def test_the_profiler_sees_the_exchange_of_gradients(tmp_path: Path) -> None:
    on(2, tmp_path, "profiled.py")
    names = {
        event.get("name", "") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert any("all_reduce" in name or "allreduce" in name for name in names)


def test_submitit_returns_what_the_run_printed(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, SCRIPTS / "submitit_job.py", SCRIPTS / "omegaconf_config.py")
    assert printed.startswith("lr 0.1, batch 32")


def test_a_script_that_may_be_debugged_runs_without_a_debugger(tmp_path: Path) -> None:
    assert on(2, tmp_path, "debugged.py") == "gradient 2 ranks\n"


class Debugger:
    """An editor's side of the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self._socket, self._sent = connected(port), 0
        self._file = self._socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, command: str, **arguments: Any) -> None:
        self._sent += 1
        body = json.dumps(
            {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        ).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def until(self, name: str) -> dict[str, Any]:
        """The next event or answer of this name."""
        while True:
            length = int(self._file.readline().partition(b":")[2])
            self._file.readline()
            found: dict[str, Any] = json.loads(self._file.read(length))
            if name in (found.get("event"), found.get("command")):
                return found


@pytest.mark.timeout(120)
def test_a_debugger_attaches_to_one_rank_and_stops_it_at_a_breakpoint(tmp_path: Path) -> None:
    port, script = free_port(), SCRIPTS / "debugged.py"
    line = next(at for at, text in enumerate(script.read_text().splitlines(), 1) if text.startswith("print("))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DEBUG_RANK": "1", "DEBUG_PORT": str(port)}
    started = subprocess.Popen(
        [BIN / "samestep", "run", "-n", "2", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    debugger = Debugger(port)
    try:
        debugger.ask("initialize", adapterID="debugpy")
        debugger.ask("attach", name="attach")
        debugger.until("initialized")
        debugger.ask("setBreakpoints", source={"path": str(script)}, breakpoints=[{"line": line}])
        debugger.ask("configurationDone")
        thread = debugger.until("stopped")["body"]["threadId"]
        debugger.ask("stackTrace", threadId=thread)
        (frame, *_) = debugger.until("stackTrace")["body"]["stackFrames"]
        assert (frame["line"], Path(frame["source"]["path"]).name) == (line, "debugged.py")
        debugger.ask("evaluate", expression="world.rank", frameId=frame["id"])
        assert debugger.until("evaluate")["body"]["result"] == "1"
        debugger.ask("continue", threadId=thread)
        assert started.communicate(timeout=50)[0] == "gradient 2 ranks\n"
    finally:
        debugger.close()
        started.terminate()
        started.wait()


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(SCRIPTS / "notebook.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=50, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[-1]["data"]["text/plain"] == "2"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_at_most_40_lines(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 40


def manifests() -> list[dict[str, Any]]:
    import yaml

    page = (SCRIPTS.parents[1] / "docs" / "kubernetes.md").read_text()
    found = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [document for text in found for document in yaml.safe_load_all(text)]


def pods(tmp_path: Path, command: list[str], variables: list[dict[str, str]]) -> list[str]:
    """What each pod prints, all started together."""
    (tmp_path / "train.py").write_text(
        "import samestep\nw = samestep.init()\nprint(w.size, samestep.sum(1))\n"
    )
    base = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=base | own, stdout=subprocess.PIPE, text=True)
        for own in variables
    ]
    printed = [pod.communicate(timeout=50)[0] for pod in started]
    assert [pod.returncode for pod in started] == [0] * len(started)
    return printed


def test_the_command_of_the_indexed_job_makes_one_run_of_its_pods(tmp_path: Path) -> None:
    _, job, _ = manifests()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell, flag, line = container["command"]
    held, port = hold_port()
    held.close()
    # There are no pods here: the first one is this machine, and one process stands for a pod's devices.
    line = line.replace("train-0.train:29500", f"127.0.0.1:{port}").replace(
        "samestep run", "samestep run -n 1"
    )
    variables = [
        {"JOB_COMPLETION_INDEX": str(pod), "SAMESTEP_RUN_DIR": str(tmp_path / str(pod))}
        for pod in range(job["spec"]["completions"])
    ]
    assert pods(tmp_path, [shell, flag, line], variables) == ["2 2\n", ""]


@pytest.mark.parametrize("launcher", [["torchrun"], ["samestep", "run", "--all-ranks"]])
def test_the_variables_of_a_pytorchjob_make_one_run_of_its_pods(tmp_path: Path, launcher: list[str]) -> None:
    *_, job = manifests()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    commands = [replica["template"]["spec"]["containers"][0]["command"] for replica in replicas.values()]
    assert commands[0] == commands[1]
    held, port = hold_port()
    held.close()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PET_NNODES": "2"}
    shared |= {"PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"]}
    shared |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    variables = [shared | {"RANK": str(pod), "PET_NODE_RANK": str(pod)} for pod in range(2)]
    assert commands[0] == ["torchrun", "train.py"]
    printed = pods(tmp_path, [*launcher, "train.py"], variables)
    assert [text.count("4 4\n") for text in printed] == [2, 2]
