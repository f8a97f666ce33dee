import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from fournodes import NODES, Cluster

pytestmark = pytest.mark.slurm


def _ping(cluster: Cluster, source: str, target: str) -> bool:
    reach = f"import socket; socket.create_connection(('{target}', 6818), timeout=1)"
    words = cluster.command(sys.executable, "-c", reach, node=source)
    return subprocess.run(words, capture_output=True).returncode == 0


def _parts(state: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        belongs = str(state) in " ".join(process.info["cmdline"] or []) + str(process.info["environ"])
        if belongs and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.info["cmdline"]))
    return found


def test_a_step_runs_on_every_node_in_the_order_of_the_list(cluster: Cluster) -> None:
    seen = cluster.run("srun", "--nodes=4", "--label", "printenv", "SLURMD_NODENAME")
    assert sorted(seen.splitlines()) == [f"{k}: {node}" for k, node in enumerate(NODES)]


def test_each_node_has_its_own_name_which_the_others_can_resolve(isolated: Cluster) -> None:
    words = "import socket; print(socket.gethostname(), socket.gethostbyname('ssnode1'))"
    seen = isolated.run("srun", "--nodes=4", "--label", sys.executable, "-c", words)
    assert sorted(seen.splitlines()) == [f"{k}: {node} 10.77.0.1" for k, node in enumerate(NODES)]


def test_a_batch_script_finds_srun_and_reaches_the_other_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("--nodes=3", "--wrap=srun printenv SLURM_PROCID", "--output=out", cwd=tmp_path)
    cluster.wait_state(job, "COMPLETED")
    assert sorted((tmp_path / "out").read_text().split()) == ["0", "1", "2"]


def test_tasks_see_the_devices_they_were_given(cluster: Cluster) -> None:
    seen = cluster.run(
        "srun", "--ntasks=4", "--nodes=1", "--gpus-per-task=1", "printenv", "CUDA_VISIBLE_DEVICES"
    )
    assert sorted(seen.split()) == ["0", "1", "2", "3"]
    assert cluster.run("srun", "--gres=gpu:4", "printenv", "CUDA_VISIBLE_DEVICES").split() == ["0,1,2,3"]


@pytest.mark.slow
def test_a_cut_link_lets_nothing_through_until_it_is_restored(isolated: Cluster) -> None:
    assert _ping(isolated, "ssnode1", "ssnode2")
    isolated.cut("ssnode2")
    assert not _ping(isolated, "ssnode1", "ssnode2")
    assert not _ping(isolated, "ssnode2", "ssnode3")
    assert _ping(isolated, "ssnode1", "ssnode3")
    isolated.restore("ssnode2")
    assert _ping(isolated, "ssnode1", "ssnode2")


@pytest.mark.slow
def test_a_limited_link_is_as_slow_as_it_was_told(isolated: Cluster) -> None:
    receive = (
        "import socket; s = socket.create_server(('', 7000)); print(flush=True)\n"
        "c, _ = s.accept()\nwhile c.recv(1 << 16): pass"
    )
    send = "import socket; c = socket.create_connection(('ssnode1', 7000)); c.sendall(bytes(2_000_000))"

    def seconds() -> float:
        words = isolated.command(sys.executable, "-c", receive, node="ssnode1")
        with subprocess.Popen(words, stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            start = time.monotonic()
            isolated.run(sys.executable, "-c", send, node="ssnode2")
            receiver.wait(timeout=30)
            return time.monotonic() - start

    isolated.limit("ssnode2", "10mbit")
    limited = seconds()
    isolated.restore("ssnode2")
    assert 1.2 < limited < 6
    assert seconds() < limited / 2


def test_a_job_lives_through_a_restart_of_the_controller(cluster: Cluster, tmp_path: Path) -> None:
    until = tmp_path / "go"
    words = f"--wrap=while [ ! -e {until} ]; do sleep 0.1; done; echo done"
    job = cluster.submit(words, "--output=out", cwd=tmp_path)
    cluster.wait_state(job, "RUNNING")
    cluster.restart_controller()
    until.touch()
    cluster.wait_state(job, "COMPLETED")
    assert (tmp_path / "out").read_text() == "done\n"


@pytest.mark.slow
def test_an_urgent_job_requeues_the_one_in_its_way(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.submit("--nodes=4", "--exclusive", "--wrap=sleep 100", "--output=/dev/null", cwd=tmp_path)
    cluster.wait_state(first, "RUNNING")
    urgent = cluster.submit(
        "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=true", "--output=/dev/null", cwd=tmp_path
    )
    cluster.wait_state(urgent, "COMPLETED")
    cluster.wait_state(first, "PENDING", "RUNNING")
    assert cluster.field(first, "Restarts") == "1"


def test_without_namespaces_a_step_still_runs_on_every_node(cluster: Cluster) -> None:
    with Cluster(isolated=False) as plain:
        seen = plain.run("srun", "--nodes=4", "--label", "printenv", "SLURMD_NODENAME")
        plain.kill_node("ssnode4")
        assert len(_parts(cluster.state)) >= 6
        plain.start_node("ssnode4")
    assert sorted(seen.splitlines()) == [f"{k}: {node}" for k, node in enumerate(NODES)]
    assert not _parts(plain.state)


def test_a_cluster_beside_another_leaves_nothing_when_its_owner_is_killed(cluster: Cluster) -> None:
    owner = (
        "from fournodes import Cluster\nimport time\n"
        "with Cluster() as c:\n c.submit('--nodes=4', '--wrap=srun sleep 1000', '--output=/dev/null')\n"
        " print(c.state, flush=True)\n time.sleep(1000)"
    )
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", owner], cwd=here, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        state = Path(process.stdout.readline().strip())
        assert _parts(state)
        process.send_signal(signal.SIGKILL)
    with Cluster() as after:
        assert not state.exists()
        deadline = time.monotonic() + 5
        while (left := _parts(state)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
        state = after.state
    assert not state.exists()
    assert not _parts(state)
    assert cluster.state.exists()
    assert not [name for name in os.listdir("/sys/class/net") if name in (*NODES, "switch")]
    assert list(Path(tempfile.gettempdir()).glob("samestep-cluster-*")) == [cluster.state]
