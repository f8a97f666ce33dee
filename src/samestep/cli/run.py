"""`samestep run`: a script on N processes of this machine, or of several; torchrun's spellings are understood."""

import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from samestep.cli.output import (
    NoScript,
    check_module,
    check_script,
    harmless,
    numbers,
    ranks_of,
    remark_on_options,
    verb,
)
from samestep.errors import UsageError
from samestep.placement.devices import COUNTED, are_cores_free, cores, masked, visible_devices
from samestep.placement.place import place
from samestep.start.allocation import allocation_command
from samestep.start.nodes import NodeMeeting, by_hand, by_step, check_alone
from samestep.start.python import remark_on_python, scripts_python
from samestep.start.scan import remark_on
from samestep.start.script import Script, run_script
from samestep.start.signals import PASSED_ON
from samestep.text import counted, printable

_MANY = 1 << 20  # more ranks than any run has: with several nodes the number is not known yet
_OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

_REFUSED = 2  # argparse and click end so
_KEPT = "every rank's output is kept in the run's logs"
_NOT_OFFERED = {
    "--numa-binding": "every process has cores of its own",
    "--virtual-local-rank": "every process is told its device by LOCAL_RANK",
    **dict.fromkeys(("--logs-specs", "--duplicate-stdout-filters", "--duplicate-stderr-filters"), _KEPT),
    # of torch 2.14
    "--log-line-prefix-template": "--tee begins every line with its rank",
    "--print-completion": "`samestep completion` prints it",
    # of accelerate launch
    "--mixed-precision": "the script says it, as with torch.autocast",
    "--backend": "the script says it, as samestep.init(backend=...)",
    "--cpu": "the script's device decides; CUDA_VISIBLE_DEVICES= hides all GPUs",
    "--multi-gpu": "there is one process for each visible device",
}
# The names in Accelerate and other tools, and ours.
_ELSEWHERE = {
    **dict.fromkeys(("--num-processes", "--np", "--ntasks", "--gpus", "--num-gpus", "--ngpus"), "-n"),
    "--num-machines": "--nodes",
    "--machine-rank": "--node-rank",
}
_FLAGS = ("--standalone", "--run-path", "--virtual-local-rank", "--cpu", "--multi-gpu")
_HIDDEN = (
    *_ELSEWHERE,
    *("--master-addr", "--master-port", "--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--local-addr"),
    *("--redirects", "--local-ranks-filter", "--monitor-interval", "--role", "--start-method"),
    *("--event-log-handler", *(_NOT_OFFERED.keys() - set(_FLAGS)), *_FLAGS),
)


_MOST_OF_A_CORE = 2  # processes of a core that need no remark
_FROM_0 = click.IntRange(0)
_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _seconds(name: str, help: str, default: float | None = None, *, not_0: bool = False) -> _Decorator:
    kind = click.FloatRange(0, min_open=not_0)
    kind.name = "number of seconds"
    return click.option(name, metavar="S", type=kind, default=default, help=f"Seconds {help}")


def _hidden_options(command: Any) -> Any:
    """Add the options of torchrun and other tools that the help does not show."""
    for name in _HIDDEN:
        names = ("-r", name) if name == "--redirects" else (name,)
        kind = click.IntRange(1, 65535) if name == "--master-port" else None
        command = click.option(*names, hidden=True, is_flag=name in _FLAGS, type=kind)(command)
    return command


@verb("samestep", allow_interspersed_args=False, token_normalize_func=lambda token: token.replace("_", "-"))
@click.option(
    *("-n", "--nproc-per-node", "count"),
    metavar="N",
    help="Processes on each node, or 4,2 by node  [one for each visible device]",
)
@click.option("--devices", metavar="0,2", help="One process on each of these devices; hides others  [all]")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, not a Python file.")
@click.option("--run-dir", "--log-dir", metavar="DIR", help="Where runs go  [$SAMESTEP_RUN_DIR, ./runs]")
@click.option("-t", "--tee", metavar="all|0,3", help="Ranks whose output is shown  [0]; the logs keep all.")
@click.option("--all-ranks", is_flag=True, help="The same as --tee all.")
@click.option(
    "--max-restarts",
    metavar="K",
    type=_FROM_0,
    default=0,
    help="Start again after a failure, K times at most  [0]",
)
@click.option(
    "--same",
    is_flag=True,
    help="The serial script's own numbers at any number of processes: dropout, noise and BatchNorm of the whole batch "
    "(see docs/three-levels.md).",
)
@click.option(
    "--fork/--no-fork",
    default=None,
    help="Fork the ranks from a process that has imported torch (see docs/restarts.md)  [restarts alone]",
)
@click.option("--restart-on", metavar="75", help="Start again only after these exit codes  [any]")
@_seconds("--shutdown-timeout", "that workers have to end  [1 after a failure, 30 after Ctrl-C]")
@_seconds("--hang-timeout", "that ranks may wait before the run ends  [init's timeout, 600]", not_0=True)
@click.option("--signals-to-handle", metavar="NAMES", help="More signals to pass on to workers, as SIGQUIT.")
@click.option(
    "--nodes",
    "--nnodes",
    metavar="N",
    help="Machines that run this command together, or 1:2 where 1 of 2 is enough to go on  [1]",
)
@click.option("--node-rank", type=_FROM_0, metavar="K", help="Number of this machine, from 0.")
@click.option(
    "--rendezvous",
    "--rdzv-endpoint",
    metavar="URL",
    help="Where machines meet: tcp://HOST:PORT of machine 0, env:// ($MASTER_ADDR, $MASTER_PORT), or a shared "
    "file:///PATH.",
)
@_seconds("--wait", "to wait for the other machines  [1800]", 1800.0)
@_hidden_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT on N processes of this machine, or of several that run this command together.

    \b
    samestep run -n 2 train.py --epochs 3
    samestep run --devices 0,2 train.py
    samestep run -n 4 --tee all -m package.train
    samestep run -n 2 --restart-on 75 --max-restarts 10 train.py
    samestep run -n 4 --nodes 2 --node-rank 1 --rendezvous tcp://node01:29500 train.py

    SCRIPT may be - for standard input. Words after SCRIPT are its own arguments.

    The exit code is that of the first worker that fails; 75: stopped at a checkpoint, 126 and 127: cannot be
    executed, 130: Ctrl-C, 128 + N: signal N.
    """
    for name, ours in _ELSEWHERE.items():
        if given := options[name.removeprefix("--").replace("-", "_")]:
            raise UsageError(f"{name} is {ours} here; write {ours} {given}")
    for name, why in _NOT_OFFERED.items():
        if options[name.removeprefix("--").replace("-", "_")]:
            raise UsageError(f"{name} is not offered: {why}; leave it out")
    codes, restarts = options["restart_on"], options["max_restarts"]
    if codes and not restarts:
        raise UsageError(
            "--restart-on has no effect without --max-restarts; add for instance --max-restarts 10"
        )
    with ExitStack() as cleanup:
        try:
            where = _where(options, script)
            env, size = _size(options, where.me.number if where else 0)
            file = _from_stdin(env, cleanup) if script == "-" else script
            if options["rdzv_id"]:
                env["TORCHELASTIC_RUN_ID"] = options["rdzv_id"]
            if options["same"]:
                env["SAMESTEP_SAME"] = "1"
            started = Script(
                name="<stdin>" if script == "-" else script,
                command=_argv(file, args, options),
                size=size,
                shown=_shown(options, _MANY if where else size),
                where=where,
                run_dir=options["run_dir"],
                env=env,
                address=options["master_addr"] or "127.0.0.1",
                port=options["master_port"],
                restart_on=frozenset(numbers("--restart-on", codes, "exit codes") if codes else ()),
                max_restarts=restarts,
                fork=options["fork"],
                patience_s=options["shutdown_timeout"],
                hang_timeout_s=options["hang_timeout"],
                signals=_signals(options["signals_to_handle"]),
            )
            _remark(file, args, size, options, is_counted=COUNTED in env)
            code = _run(started, file, args)
        except NoScript as error:
            click.echo(harmless(f"samestep: {error}"), err=True)
            code = 126 if Path(script).exists() else 127
        except OSError as error:
            reason = error.strerror or str(error)
            # only the first letter in lower case: the rest may contain a path
            click.echo(f"samestep: {script} cannot be executed ({reason[:1].lower()}{reason[1:]})", err=True)
            code = 127 if isinstance(error, FileNotFoundError) else 126
    raise SystemExit(code)


# As with torchrun, each option can be set by a variable: Kubeflow's operator sets PET_NNODES, PET_NODE_RANK, ...
for _option in command.params:
    _names = (name.lstrip("-").upper().replace("-", "_") for name in _option.opts if name.startswith("--"))
    _option.envvar = [f"PET_{name}" for name in _names]


def _run(started: Script, file: str, args: Sequence[str]) -> int:
    code = run_script(started)
    if code == _REFUSED:
        remark_on_options("samestep run", command, file, args, has_refused=True)
    return code


def _remark(
    file: str, args: Sequence[str], size: int, options: Mapping[str, Any], *, is_counted: bool
) -> None:
    """Print remarks on stderr about what a user may not expect of this start."""
    remark_on_options("samestep run", command, file, args)
    if options["count"] is None and not is_counted:
        click.echo(
            "no device is visible, so this is 1 process; for two on this machine's cores: samestep run -n 2 ...",
            err=True,
        )
    if size > _MOST_OF_A_CORE * (own := len(cores())) and are_cores_free(os.environ):
        they = f"samestep: {size} processes take turns on {counted(own, 'core')}"
        click.echo(
            f"{they}, so they are slower than {own} and need more memory; write -n {own} for speed", err=True
        )
    python = None if options["no_python"] else remark_on_python()
    for remark in (python, remark_on(Path(file), size) if size > 1 else None):
        if remark:
            click.echo(f"samestep: {remark}", err=True)


def _from_stdin(env: dict[str, str], cleanup: ExitStack) -> str:
    """Save the script on stdin in a file; it finds modules in the current directory, as with `python -`."""
    home = cleanup.enter_context(TemporaryDirectory(prefix="samestep-stdin-"))
    path = Path(home, "stdin.py")
    path.write_bytes(sys.stdin.buffer.read())
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    return str(path)


def _argv(script: str, args: tuple[str, ...], options: Mapping[str, Any]) -> list[str]:
    if options["no_python"]:
        if options["module"]:
            raise UsageError("-m runs a Python module and --no-python runs a program; leave one of them out")
        if not shutil.which(script):
            reason = errno.EACCES if Path(script).exists() else errno.ENOENT
            raise OSError(reason, os.strerror(reason))
        return [script, *args]
    if options["module"]:
        if scripts_python() == sys.executable:
            check_module(script)
        return [scripts_python(), "-m", script, *args]
    if script.startswith("python") and not Path(script).exists():
        raise UsageError(f"samestep run starts Python itself; leave the word {script} out")
    check_script(script, is_module=False)
    return [scripts_python(), script, *args]


def _where(options: Mapping[str, Any], script: str) -> NodeMeeting | None:
    """The meeting of several nodes; in the shell of an allocation, start this command on all its nodes instead."""
    if options["standalone"]:
        if options["node_rank"] or options["nodes"] not in (None, "1", "1:1"):
            raise UsageError("--standalone means one node; leave it out, or --nodes and --node-rank")
        return None
    # inside a Slurm step, --nodes 1:2 only says how many nodes are enough
    is_of_step = ":" in (options["nodes"] or "") and "SLURM_STEP_ID" in os.environ
    if options["nodes"] and not (is_of_step and not options["rendezvous"]):
        return by_hand(options, _title(options, script))
    # Inherited variables of a rank describe this process, not the processes to be started.
    here = place({name: value for name, value in os.environ.items() if name not in _OF_A_RANK})
    if here.launcher == "alone":
        step = allocation_command(os.environ, sys.argv[2:], bool(options["count"] or options["devices"]))
        if step:
            job, nodes = (printable(os.environ.get(f"SLURM_JOB_{name}", "")) for name in ("ID", "NODELIST"))
            click.echo(
                f"samestep: this shell is in no job step of Slurm job {job}; srun starts one on {nodes}",
                err=True,
            )
            os.execv(step[0], step)
    where = by_step(here, options["wait"], options["nodes"])
    if where is None and options["nodes"]:
        return by_hand(options, _title(options, script))
    if where is None:
        check_alone(options)
    return where


def _title(options: Mapping[str, Any], script: str) -> str:
    """The name that must be the same on every node; paths, arguments and a program's name may differ."""
    if options["no_python"]:
        return ""
    return f"-m {script}" if options["module"] else Path(script).name


def _size(options: Mapping[str, Any], node: int) -> tuple[dict[str, str], int]:
    """The variable that masks devices, and the number of processes."""
    count, devices = options["count"], options["devices"]
    if count and re.fullmatch("[0-9]{1,4}(,[0-9]{1,4})+", count):
        counts = count.split(",")
        if not 0 <= node < len(counts):
            raise UsageError(f"-n {count} has {len(counts)} numbers, none of them for node {node}; add one")
        count = counts[node]
    if devices:
        env, size = masked(os.environ, devices)
        if count and count != str(size):
            raise UsageError(f"-n {count} is not the number of devices in --devices {devices}; leave -n out")
        return env | {COUNTED: str(size)}, size
    visible = len(visible_devices(os.environ))
    if count is None and not visible:
        return {}, 1
    if count in ("gpu", "xpu") and not visible:
        raise UsageError(f"-n {count} asks for a process on each device, but none is visible; write a number")
    if count in (None, "gpu", "xpu"):
        return {COUNTED: str(visible)}, visible
    if count in ("cpu", "auto"):
        return {}, (count == "auto" and visible) or len(cores())
    if not re.fullmatch(r"[1-9][0-9]{0,3}", count):
        mpirun = ", as -n 2 for mpirun's -np 2" if count == "p" else ""
        raise UsageError(f"-n {count} is not a number of processes; write 1 to 9999{mpirun}")
    return {}, int(count)


def _shown(options: Mapping[str, Any], size: int) -> Container[int]:
    tee, only, redirects = options["tee"], options["local_ranks_filter"], options["redirects"]
    if redirects not in (None, "0", "3"):
        raise UsageError(f"-r {redirects} redirects a part of the output; files keep all, so leave -r out")
    if tee in ("1", "2") or (tee and ":" in tee):
        raise UsageError(f"--tee {tee} shows a part of a rank's output; write --tee all, or ranks as 0,1")
    shown: Container[int] = frozenset(() if redirects == "3" else {0})
    # torchrun's 3 means stdout and stderr of all ranks
    if options["all_ranks"] or tee in ("all", "3"):
        shown = range(size)
    elif tee:
        shown = frozenset(ranks_of("--tee", tee, size))
    if only is None:
        return shown
    return frozenset(rank for rank in ranks_of("--local-ranks-filter", only, size) if rank in shown)


def _signals(names: str | None) -> tuple[signal.Signals, ...]:
    signals = list(PASSED_ON)
    for name in names.split(",") if names else ():
        number = signal.Signals.__members__.get(name.strip())
        if number in (None, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise UsageError(
                f"--signals-to-handle {name} is not a signal that can be passed on; write names such as SIGUSR1"
            )
        signals.append(number)
    return tuple(dict.fromkeys(signals))
