"""The rank that the others wait for is named, with its line; a run that is slow but goes on is told nothing untrue."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from cluster.network import possible
from hang import SCRIPT, Case, fault, run, untrue

from samestep.hang import RankState, find_hang

needs_machines = pytest.mark.skipif(not possible(), reason="networks of their own need root")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("stop"), marks=pytest.mark.slow),
        pytest.param(Case("gil", "first step", exact=True, size=2), marks=pytest.mark.slow),
        pytest.param(Case("loader"), marks=pytest.mark.slow),
        pytest.param(Case("c-sleep"), marks=pytest.mark.slow),
        pytest.param(Case("ddp", "evaluation", rank=0), marks=pytest.mark.slow),
        pytest.param(Case("hook"), marks=pytest.mark.long),
        pytest.param(Case("extra", rank=0), marks=pytest.mark.long),
        pytest.param(Case("exit"), marks=pytest.mark.long),
        Case("os-exit", "evaluation"),
        pytest.param(Case("sleep", "evaluation", rank=1, nodes=2), marks=[needs_machines, pytest.mark.slow]),
        pytest.param(Case("link", rank=2, nodes=2), marks=[needs_machines, pytest.mark.long]),
    ],
    ids=str,
)
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(case, tmp_path):
    assert fault(case, *run(case, tmp_path), allowed_s=20) is None


@pytest.mark.slow
def test_a_slow_rank_is_said_to_be_waited_for_and_the_run_goes_on(tmp_path):
    case = Case("slow", "checkpoint", rank=0, size=2)
    code, lines, _ = run(case, tmp_path, "--slow", 6.5, limit_s=60)
    assert untrue(case, 6.5, code, lines) == []
    text = "\n".join(text for _, text in lines)
    assert "samestep: rank 1 has waited" in text
    assert "samestep: rank 0 has gone on" in text


@pytest.mark.slow
def test_sigterm_ends_a_hung_run_within_the_shutdown_timeout_and_status_says_who_waits(tmp_path):
    options = ["-n", "2", "--fork", "--all-ranks", "--shutdown-timeout", "6"]
    started = subprocess.Popen(
        [sys.executable, "-m", "samestep", "run", *options, str(SCRIPT), "--kind", "sleep"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while "stuck at" not in started.stdout.readline():
            pass
        asked = time.monotonic()
        os.kill(started.pid, signal.SIGTERM)
        time.sleep(5.2)
        status = [sys.executable, "-m", "samestep", "status"]
        said = subprocess.run([*status], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert re.search(
            r"rank 0 has waited \S+ s in .* for rank 1, which is in sleep \(stuck.py:\d+\)\n", said
        )
        report = started.communicate(timeout=20)[0]
        assert time.monotonic() - asked < 20  # of 30 s by default
        assert started.returncode == 128 + signal.SIGTERM
        assert "for rank 1, which is in sleep (stuck.py:" in report
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()


@pytest.mark.slow
def test_a_rank_of_another_node_is_named_once_and_ends_the_run_of_all(launcher):
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    nodes = ["--nodes", "2", "--rendezvous", at, "--hang-timeout", "8"]
    script = [str(SCRIPT), "--kind", "sleep", "--rank", "2"]
    launchers = [
        launcher.start("-n", count, "--fork", *nodes, "--node-rank", node, *script)
        for node, count in (("0", "2"), ("1", "1"))
    ]
    ends = [node.finish() for node in launchers]
    assert [code for code, _, _ in ends] == [1, 1]
    first, second = (err for _, _, err in ends)
    assert re.search(
        r"^samestep: ranks 0, 1 have waited .* for rank 2, which is in sleep \(stuck", first, re.MULTILINE
    )
    assert "samestep: ranks" not in second
    assert "failed on rank 2 of 3" in first


def state(rank, phase, waits, seconds=9.0, call="", step=4):
    return RankState(rank, step, phase, call, waits, seconds)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([("forward", 3), ("data", 3), ("user", 3)], None),
        ([("exchange", 4), ("data", 3), ("exchange", 4)], "ranks 0, 2 have waited 9.0 s in the gradient exchange of "
         "step 4 for rank 1, which is reading data at step 4"),
        ([("exchange", 4), ("exchange", 4), ("exchange", 4)], "all ranks have been in the gradient exchange of step 4"),
        ([("exchange", 4), ("user", 4), ("exchange", 4)], None),
        ([("exchange", 4), ("exchange", 3)], None),  # which may wait for the rank of which nothing is known
        ([("exchange", 4), ("call", 4), ("exchange", 4)], "ranks 0, 2 have waited 9.0 s in the gradient exchange of "
         "step 4 for rank 1, which is in samestep.sum (train.py:9); these are different calls, so no rank can go on "
         "(does each rank make that call, and call backward() as often?)"),
        ([("call", 5), ("exchange", 4), ("forward", 3)], "rank 0 has waited 9.0 s in samestep.sum (train.py:9) and "
         "rank 1 has waited 9.0 s in the gradient exchange of step 4 for rank 2, which is in forward at step 4"),
        ([("exchange", 4), ("end", 3), ("exchange", 4)], "for rank 1, which has come to the end of the script"),
    ],
)  # fmt: skip
def test_who_waits_is_told_from_the_number_of_waits(states, says):
    call = {"call": "samestep.sum (train.py:9)"}
    found = find_hang(
        [state(r, phase, waits, call=call.get(phase, "")) for r, (phase, waits) in enumerate(states)], 3, 5
    )
    assert (says is None) == (found is None)
    if says:
        assert says in found.sentence()


def test_those_who_have_all_come_wait_only_since_the_last_one_came():
    states = [state(0, "exchange", 4, 60.0), state(1, "exchange", 4, 0.5)]
    assert find_hang(states, 2, 5.0) is None


def test_a_rank_of_another_node_is_not_guessed_at():
    assert find_hang([state(0, "exchange", 4)], 2, 5.0) is None


@pytest.mark.slow
def test_a_rank_at_another_call_than_the_others_is_the_cause_and_not_the_first_that_says_so(launcher):
    launcher.write(
        """
        import samestep
        if samestep.init().rank == 2:
            samestep.sum(1)
        samestep.mean(1)
        """
    )
    code, _, err = launcher.run("-n", "3", "--fork", "train.py")
    assert code == 1
    assert "failed on rank 2 of 3" in err
    assert "ranks are at different calls: rank 2 at samestep.sum (train.py:4)" in err


@pytest.mark.slow
def test_a_rank_that_differs_is_the_cause_also_where_it_takes_longer_to_say_so_than_the_others(launcher):
    launcher.write(
        """
        import samestep, time
        if samestep.init().rank == 1:
            try:
                samestep.sum(1)
            finally:
                time.sleep(20)
        samestep.mean(1)
        """
    )
    code, _, err = launcher.run("-n", "3", "--fork", "train.py")
    assert code == 1
    assert "failed on rank 1 of 3" in err
    assert "ranks are at different calls: rank 1 at samestep.sum (train.py:5)" in err
    assert "ranks 0, 2 failed too" in err


def test_all_who_look_at_ranks_that_wait_for_each_other_blame_the_same_rank():
    states = [state(0, "call", 4, call="all_reduce"), state(1, "call", 4, call="barrier")]
    assert find_hang(states, 2, 5.0) == find_hang(states[::-1], 2, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "made", "call"),
    [
        (["samestep", "run", "-n"], "dist.all_reduce(ones, async_op=True).wait()", "Work.wait"),
        (
            ["torch.distributed.run", "--standalone", "--nproc-per-node"],
            "dist.all_reduce(ones)",
            "all_reduce",
        ),
    ],
)
def test_ranks_that_wait_for_each_other_in_calls_of_torch_are_told_that_none_can_go_on(
    way, made, call, launcher
):
    launcher.write(
        f"""
        import torch, torch.distributed as dist, samestep
        ones = torch.ones(3)
        if samestep.init().rank == 0:
            {made}
        else:
            dist.barrier()
        """
    )
    command = [sys.executable, "-m", *way, "2", "train.py"]
    out = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started = subprocess.Popen(command, cwd=launcher.home, env=launcher.env, **out)
    try:
        notice = next(line for line in started.stderr if " has waited " in line)
        says = f"in barrier .train.py:7. for rank 0, which is in {call} .train.py:5.; these are different calls, so"
        assert re.search(says, notice)
        assert ("; the run ends in 9 min" in notice) == ("samestep" in way)
    finally:
        started.terminate()  # torchrun that is killed leaves its workers
        started.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("unused", ["0, 1", "0"])
def test_a_rank_that_does_not_come_is_named_also_where_a_parameter_gets_no_gradient(unused, launcher):
    launcher.write(
        f"""
        import torch, samestep
        rank = samestep.init().rank
        layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        model = torch.nn.Sequential(*layers)
        model.forward = lambda x: layers[0](x) if rank in [{unused}] else torch.nn.Sequential.forward(model, x)
        model = samestep.replicate(model)
        for step, (x,) in enumerate(samestep.loader(torch.utils.data.TensorDataset(torch.ones(40, 2)), 4)):
            loss = model(x).sum(1).mean()
            if rank == 1 and step == 2:
                samestep.sum(1)
            loss.backward()
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "--hang-timeout", "6", "train.py")
    assert code == 1
    says = "rank 0 has waited .* in the gradient exchange of step 3 .train.py:12. for rank 1, which is in samestep.sum"
    assert re.search(says, err)


@pytest.mark.slow
def test_the_line_of_a_sys_exit_in_a_hook_of_backward_is_told(launcher):
    launcher.write(
        """
        import sys, torch, samestep
        rank = samestep.init().rank
        model = samestep.replicate(torch.nn.Linear(2, 1))
        if rank == 1:
            model.weight.register_hook(lambda grad: sys.exit(9))
        for (x,) in samestep.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 4):
            model(x).sum().backward()
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert (code, "rank 1 left the script at train.py:6" in err) == (9, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code"), [("raise SystemExit(9)", 9), ("exit(9)", 9), ("leave()", 9), ("raise SystemExit", 1)]
)
def test_the_line_at_which_a_rank_leaves_is_told_however_it_leaves(launcher, way, code):
    launcher.write(
        f"""
        import samestep
        def leave():
            raise SystemExit(9)
        if samestep.init().rank == 1:
            {way}
        samestep.sum(1)
        """
    )
    ended, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert (ended, "rank 1 left the script at train.py:6" in err) == (code, True), err


# What rank 1 does from line 9 on, while rank 0 joins in line 3 and makes a sum in line 4, and what is said of it.
UNFINISHED = {
    "absent": (
        "time.sleep(99)",
        "rank 0 has waited 5.* s in samestep.init .train.py:3. for rank 1, which has not come to samestep.init",
    ),
    "left": (
        "sys.exit()",
        "rank 0 has .* for rank 1, which ended before it came to samestep.init .exit code 0.",
    ),
    "failed": (
        "join()\nthread.start()\nraise ValueError('why')",
        "rank 0 has .* in samestep.sum .train.py:4. for rank 1, which failed with ValueError at train.py:11",
    ),
    "ends": (
        "join()\ntotal()\nthread.start()",
        "the run has waited 10.* s for the end of rank 1, which has come to the end of the script, and "
        "waits for a thread that is no daemon",
    ),
    "works": (
        "join()\ntotal()\nthreading.Thread(target=lambda: time.sleep(99)).start()",
        "the run has waited 10.* s for the end of rank 1, which has come to the end of the script, and "
        "waits for its thread, which is in <lambda> .train.py:11.",
    ),
    "removed": (
        "join()\ntime.sleep(1)\nshutil.rmtree(os.environ['SAMESTEP_RUN'])\ntime.sleep(99)",
        "rank 0 has .* in samestep.sum .train.py:4. for rank 1, which is at train.py:12",
    ),
    "code": (
        "join()\nthread.start()\nsys.exit(7)",
        "rank 0 has .* in samestep.sum .train.py:4. for rank 1, which left the script at train.py:11",
    ),
    "feeder": (
        "join()\nthreading.Thread(target=lambda: [][1]).start()\ntime.sleep(99)",
        "rank 0 has .* in samestep.sum .train.py:4. for rank 1, which is at train.py:11",
    ),
}


@pytest.mark.slow
def test_ranks_that_do_not_come_or_do_not_end_are_named_and_end_the_run(launcher, tmp_path):
    runs = {}
    for name, (lines, _) in UNFINISHED.items():
        launcher.home = tmp_path / name
        launcher.home.mkdir()
        launcher.write(
            "import os, shutil, sys, threading, time, samestep\n"
            "thread = threading.Thread(target=time.sleep, args=(99,))\n"
            "def join(): samestep.init()\ndef total(): samestep.sum(1)\n"
            "if os.environ['RANK'] == '0':\n    join()\n    total()\nelse:\n" + textwrap.indent(lines, "    ")
        )
        runs[name] = launcher.start("-n", "2", "--fork", "--hang-timeout", "9", "train.py")
    for name, (_, says) in UNFINISHED.items():
        code, _, err = runs[name].finish()
        assert code == (7 if name == "code" else 1)
        assert re.search(f"^samestep: {says}", err, re.MULTILINE), err
        assert "failed on rank 1 of 2" in err
        assert ("ValueError: why" in err) == (name == "failed")
        printed = "\nrank 1 had printed a traceback: IndexError: list index out of range (train.py:10)\n"
        assert (printed in err) == (name == "feeder")


@pytest.mark.slow
def test_the_line_of_a_stuck_loader_worker_is_told_where_a_hung_run_was_asked_to_end(launcher):
    launcher.write(
        """
        import signal, time, samestep
        signal.signal(signal.SIGTERM, lambda *_: None)
        class Data:
            def __len__(self):
                return 4
            def __getitem__(self, index):
                time.sleep(99 * (rank == 1))
                return 1.0
        rank = samestep.init().rank
        for _ in samestep.loader(Data(), 2, num_workers=1):
            print(file=open("ready", "a"))
            samestep.sum(1)
        """
    )
    started = launcher.start("-n", "2", "--fork", "--shutdown-timeout", "12", "train.py")
    started.wait_for_lines("ready")
    # the rank looks after its worker every 5 s, so a look at it from outside has to be made again
    time.sleep(6)
    started.process.send_signal(signal.SIGTERM)
    code, _, err = started.finish()
    assert code == 143
    assert len(re.findall("its loader worker .pid .*, which is in __getitem__ .train.py:8.", err)) == 2


@pytest.mark.slow
def test_a_run_that_was_suspended_as_a_whole_is_no_hang(launcher):
    launcher.write(
        """
        import os, time, samestep
        rank = samestep.init().rank
        print(os.getpid(), os.getppid(), file=open(f"pids{rank}", "w"), flush=True)
        for _ in range(2 * rank):
            time.sleep(3)
        samestep.sum(1)
        """
    )
    started = launcher.start("-n", "2", "--hang-timeout", "12", "train.py")
    pids = {int(pid) for rank in range(2) for pid in started.wait_for_lines(f"pids{rank}")[0].split()}
    assert len(pids) == 3
    time.sleep(1)
    for number, seconds in ((signal.SIGSTOP, 14), (signal.SIGCONT, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    assert started.finish() == (0, "", "")
