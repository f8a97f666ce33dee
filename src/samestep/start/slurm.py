"""Writes a Slurm batch script that says exactly what was asked for, in a page, and hands it to sbatch."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UsageError
from samestep.files import make_private_directory
from samestep.rundir import CHECKPOINTED
from samestep.start.profiles import Profile
from samestep.text import reason_of

LAUNCHERS = ("srun", "samestep", "torchrun")
GPU_OPTIONS = ("gres", "gpus-per-node")
_OUTPUT = "--output="
_AGAIN = "stopped after a commit; submit this script again to go on"
_PASSED_ON = (
    *("hint", "time", "account", "partition", "qos", "constraint", "mem", "reservation"),
    *("mail_user", "mail_type"),
)
_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./\[\]&|*=-]+")
_FORMS = {
    "time": (
        "[0-9]+(:[0-9]{2}){0,2}|[0-9]+-[0-9]+(:[0-9]{2}){0,2}|UNLIMITED|INFINITE",
        "not a time limit; write minutes, 02:00:00 or 1-12:00:00",
    ),
    "signal": (
        "(R:)?[A-Z0-9]+(@[0-9]+)?",
        "not a signal that reaches the processes; write for instance USR1@120 (after B: only the batch shell gets it)",
    ),
    "array": ("[0-9,:-]+(%[0-9]+)?", "not a list of array elements; write for instance 0-7 or 1,3,5%2"),
    "option": ("--[a-z][a-z-]*(=.*)?", "not an option of sbatch; write it as --name or --name=value"),
    "env": ("[A-Za-z_][A-Za-z0-9_]*", "not a name of a variable; use letters, digits and _"),
}
_ENDS_OF_LINES = {"\n": "a newline", "\r": "a carriage return", "\0": "a NUL"}


@dataclass(frozen=True)
class Job:
    """A script to be run as a profile says."""

    profile: Profile
    script: str
    args: tuple[str, ...] = ()
    name: str | None = None
    module: bool = False
    array: str | None = None
    one_run: bool = False
    run_dir: str | None = None
    scale: tuple[str, ...] | None = None  # options of `samestep scale`, which starts the runs itself

    @property
    def title(self) -> str:
        """The job's name; the script's where none was given."""
        return self.name or (self.script.rpartition(".")[2] if self.module else Path(self.script).stem)

    @property
    def folder(self) -> Path:
        """Where its script and output go."""
        return Path(self.run_dir or "runs")

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.profile.tasks_per_node or self.profile.gpus_per_node or 1

    @property
    def cores(self) -> int | None:
        """Cores for each process: as given, or its share of the node's."""
        have = self.profile
        if have.cpus_per_task is not None or not have.cores:
            return have.cpus_per_task
        by_gpus = have.gpus and have.gpus_per_node
        share = have.cores * by_gpus // have.gpus if by_gpus else have.cores
        return max(1, share // self.tasks)

    @property
    def python(self) -> str:
        """The Python that runs the script: the one that submits, unless the job loads another."""
        have = self.profile
        loaded = have.modules or have.setup or have.container
        return have.python or ("python" if loaded else sys.executable)

    @property
    def words(self) -> list[str]:
        """The script and its arguments, as Python gets them."""
        return [*(["-m"] if self.module else []), self.script, *self.args]

    @property
    def keeps_run(self) -> bool:
        """Whether its processes keep the run's directory themselves, beside its output."""
        return self.profile.launcher == "srun" and not self.one_run and self.scale is None

    @property
    def output(self) -> str:
        """Its output's file, with what sbatch fills in; the user's own where an option names one."""
        own = [option for option in self.profile.options if option.startswith(_OUTPUT)]
        if own:
            return own[-1].removeprefix(_OUTPUT)
        number = "%A_%a" if self.array or self.one_run else "%j"
        return f"{str(self.folder).replace('%', '%%')}/%x_{number}.out"


def batch_script(job: Job, said: Sequence[str]) -> str:
    """The script of a job, which `said` asked for."""
    _check_words(job, said)
    _check_sense(job)
    _check_way(job)
    directives = [f"#SBATCH --{name}={_directive(value)}" for name, value in _options(job)]
    keep = "--requeue" if job.profile.requeue else "--no-requeue"
    options = [option for option in job.profile.options if not option.startswith(_OUTPUT)]
    options += ["--exclusive"] if job.profile.exclusive else []
    flags = [f"#SBATCH {_directive(option)}" for option in (keep, *options)]
    lines = ["#!/bin/bash", *directives, *flags, f"# {shlex.join(said)}", "", *_surroundings(job)]
    lines += [_step(job), "code=$?"]
    if job.profile.launcher == "torchrun":
        lines += ['if [ -e "$SAMESTEP_STOPPED" ]; then rm "$SAMESTEP_STOPPED"; code=75; fi']
    if job.keeps_run:
        lines += ['note_end "$code"']
    requeue = 'scontrol requeue "$SLURM_JOB_ID" || ' if job.profile.requeue else ""
    goes_on = ' && [ ! -e "$SAMESTEP_RUN/stop" ]' if job.keeps_run else ""
    lines += [f'if [ "$code" -eq {CHECKPOINTED} ]{goes_on}; then\n    {requeue}echo "{_AGAIN}"\nfi']
    return "\n".join([*lines, 'exit "$code"', ""])


def write_script(job: Job, said: Sequence[str]) -> Path:
    """Write the script beside the job's output, and say where it is."""
    script = batch_script(job, said).encode(errors="surrogateescape")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    stem = f"{job.title}-{time.strftime('%m%d-%H%M%S')}"
    try:
        make_private_directory(job.folder)
        for name in (f"{stem}.sh", *(f"{stem}-{k}.sh" for k in range(2, 1000))):
            # another submission may take the same name at the same moment
            with suppress(FileExistsError), open(os.open(job.folder / name, flags, 0o700), "wb") as file:
                file.write(script)
                return job.folder / name
    except OSError as error:
        raise UsageError(
            f"{job.folder} cannot be written ({reason_of(error)}); name another with --run-dir"
        ) from error
    raise UsageError(f"{job.folder} has a thousand scripts of {job.title} of this second; wait for the next")


def check_nodes(profile: Profile) -> None:
    """Refuse more nodes than the partition has, which would wait in the queue for ever."""
    chosen = [f"--partition={profile.partition}"] if profile.partition else []
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["sinfo", "-h", "-o%P %D", *chosen], capture_output=True, text=True, timeout=10)
        rows = [line.split() for line in done.stdout.splitlines()]
        # a star marks the partition of jobs that name none
        nodes = [(name, int(number)) for name, number in rows if chosen or name.endswith("*")]
        have = sum(number for _, number in nodes)
        if nodes and have < profile.nodes:
            name = nodes[0][0].rstrip("*")
            raise UsageError(
                f"nodes {profile.nodes} is more than the {have} of partition {name}; use at most {have}"
            )


def submit(path: Path) -> str:
    """Hand the script to sbatch; returns the job's id."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError(f"sbatch is not on this machine; submit {path} where it is") from None
    if done.returncode:
        reason = re.sub("(sbatch: )?(error: |fatal: )?", "", done.stderr.strip()).replace("\n", "; ")
        raise UsageError(
            f"sbatch refused {path} ({reason}); correct the option that this names, or load Slurm's module"
        )
    return done.stdout.strip().partition(";")[0]


def state_of_job(number: str) -> str | None:
    """What Slurm says of a job, such as "running", "pending" or "cancelled"; None where it cannot be asked."""
    if not re.fullmatch("[0-9]+", number):
        return None
    scontrol, sacct = f"scontrol show job -o {number}", f"sacct -nPX -o State -j {number}"
    for command, form in ((scontrol, "JobState=([A-Z_]+)"), (sacct, "^([A-Z_]+)")):
        with suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(command.split(), capture_output=True, text=True, timeout=10).stdout
            if found := re.search(form, said):
                state = found[1].lower().replace("_", " ")
                return "running" if state == "completing" else state
    return None


def output_of(job: Job, number: str) -> str | None:
    """Where the output of the job of that number (of its first element) appears, where that is known before it runs."""
    first = re.split("[^0-9]", job.array)[0] if job.array else "0"
    filled = {"%%": "%", "%x": job.title, "%j": number, "%A": number, "%a": first}
    if set(re.findall("%.?", job.output)) - set(filled):
        return None
    return re.sub("%.", lambda found: filled[found[0]], job.output)


def _check_words(job: Job, said: Sequence[str]) -> None:
    have, env = job.profile, job.profile.env or {}
    of_profile = {name.replace("_", "-"): value for name, value in vars(have).items() if type(value) is str}
    of_job = {"script": job.script, "name": job.title, "array": job.array or "0", "run-dir": str(job.folder)}
    single = {name: value for name, value in of_profile.items() if name not in ("about", "source")} | of_job
    command = [("container-command", word) for word in have.container_command]
    words = [*single.items(), *(("module", name) for name in have.modules), *command[:1]]
    forms = [*(("option", option) for option in have.options), *(("env", name) for name in env)]
    texts = [("argument", word) for word in (*said, *job.args)] + [("setup", line) for line in have.setup]
    texts += [*command, *((f"env {name}", value) for name, value in env.items())]
    for name, value in (*words, *texts, *forms):
        for character, called in _ENDS_OF_LINES.items():
            if character in value:
                raise UsageError(f"{name} {value!r} holds {called}, which would end its line; leave it out")
    for name, value in words:
        if not value or value.startswith("-"):
            why = "would be read as another option" if value else "is empty"
            raise UsageError(f"{name} {value!r} {why}; begin it with a letter")
    for name, value in (*words, *forms):
        form, wrong = _FORMS.get(name, (".*", ""))
        if not re.fullmatch(form, value):
            raise UsageError(f"{name} {value!r} is {wrong}")


def _check_sense(job: Job) -> None:
    have = job.profile
    if "\\" in str(job.folder):
        raise UsageError(
            f"run-dir {str(job.folder)!r} has a backslash, which sbatch takes for its own; leave it out"
        )
    if "/" in job.title:
        raise UsageError(f"name {job.title!r} would be read as a directory; leave the / out")
    if have.gpus and have.gpus_per_node > have.gpus:
        wanted = f"gpus-per-node {have.gpus_per_node} is more than the {have.gpus} of such a node"
        raise UsageError(f"{wanted}; use at most {have.gpus}, or more nodes")
    for first, last in re.findall("([0-9]+)-([0-9]+)", job.array or ""):
        if int(first) > int(last):
            raise UsageError(f"array {job.array!r} counts down from {first} to {last}; write {last}-{first}")
    if not have.nodes:
        raise UsageError("nodes 0 leaves no node to run on; use at least 1")


def _check_way(job: Job) -> None:
    have = job.profile
    for name, known in (("launcher", LAUNCHERS), ("gpu_option", GPU_OPTIONS)):
        if (value := getattr(have, name)) not in known:
            raise UsageError(f"{name.replace('_', '-')} {value!r} is unknown; write {' or '.join(known)}")
    if job.one_run and (job.array or have.launcher != "srun"):
        other = f"array {job.array}" if job.array else f"launcher {have.launcher}"
        raise UsageError(f"array-ranks makes its own array of single processes; leave {other} out")
    if job.scale is not None and (job.array or job.one_run or have.container or have.launcher != "srun"):
        raise UsageError("scale starts its runs itself; leave --array, --container and --launcher out")


def _options(job: Job) -> Iterator[tuple[str, object]]:
    have = job.profile
    nodes, tasks = (1, 1) if job.one_run else (have.nodes, job.tasks)
    # The others start a node's processes themselves, from one task that has the cores of all.
    share = 1 if have.launcher == "srun" else tasks
    gpus = have.gpus_per_node // job.tasks if job.one_run else have.gpus_per_node
    requests = {
        "job-name": job.title,
        "nodes": nodes,
        "ntasks-per-node": tasks // share,
        have.gpu_option: gpus and (f"gpu:{gpus}" if have.gpu_option == "gres" else gpus),
        "cpus-per-task": job.cores and job.cores * share,
        **{name.replace("_", "-"): getattr(have, name) for name in _PASSED_ON},
        "array": f"0-{have.nodes * job.tasks - 1}" if job.one_run else job.array,
        "output": job.output,
        "open-mode": "append",
        "signal": have.signal or (_early_signal(have) if job.scale is None else None),
    }
    yield from ((name, value) for name, value in requests.items() if value)


def _early_signal(have: Profile) -> str | None:
    """Two minutes before the end, less in a short job: Slurm may send it up to a minute earlier than told."""
    early = min(120, _seconds(have.time) // 2 - 60) if have.time else 120
    # torchrun does not pass this signal on; it would only die of it.
    return f"USR1@{early}" if early > 0 and have.launcher != "torchrun" else None


def _seconds(limit: str) -> int:
    if not limit[0].isdigit():
        return sys.maxsize
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Slurm counts from the left after days, in minutes where there is but one number or a pair without days.
    hours, minutes, seconds = (*parts, 0, 0)[:3] if days or len(parts) == 3 else (0, *parts, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _surroundings(job: Job) -> list[str]:
    have, cores = job.profile, job.cores
    exports = {"SRUN_CPUS_PER_TASK": cores, "OMP_NUM_THREADS": cores} if cores else {}
    if cores and have.launcher != "srun":
        exports["SRUN_CPUS_PER_TASK"] = cores * job.tasks
    ours = {**exports, "SAMESTEP_RUN_DIR": job.run_dir, "SAMESTEP_ADDRESS_SUFFIX": have.address_suffix}
    given = {name: str(value) for name, value in ours.items() if value} | dict(have.env or {})
    modules = [*([have.architecture] if have.architecture else []), *have.modules]
    lines = ["module purge", f"module load {shlex.join(modules)}"] if modules else []
    note = "|| note_end $? " if job.keeps_run else ""
    lines = [*_begin_run(job), *(f"{line} {note}|| exit" for line in (*lines, *have.setup))]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
    if have.launcher == "torchrun":  # which turns a worker's exit code 75 into 1
        lines += [
            f'export SAMESTEP_STOPPED={shlex.quote(f"{job.folder.absolute()}/{job.title}_")}"$SLURM_JOB_ID".stopped'
        ]
    return [*lines, ""] if lines else []


def _begin_run(job: Job) -> list[str]:
    """Lines that make the run's directory, so that `samestep runs` also lists a job that fails before `init`."""
    if not job.keeps_run:
        return []
    number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if job.array else '"$SLURM_JOB_ID"'
    run = shlex.quote(f"{job.folder.absolute()}/{job.title}_")
    argv = shlex.quote(json.dumps([job.python, *job.words]))
    facts = '"size": %d, "slurm_job": "%s", "host": "%s", "pid": %d, "started": %d'
    values = f'{job.profile.nodes * job.tasks} "$SLURM_JOB_ID" "$HOSTNAME" $$ "$(date +%s)"'
    return [
        "# what `samestep runs` reads",
        f"export SAMESTEP_RUN={run}{number}",
        'mkdir -p -m 700 "$SAMESTEP_RUN" && rm -f "$SAMESTEP_RUN/result.json"',
        f'printf \'{{"argv": %s, {facts}}}\\n\' \\\n    {argv} {values} > "$SAMESTEP_RUN/run.json"',
        "note_end() {",
        '    echo "{\\"exit_code\\": $1, \\"seconds\\": $SECONDS}" > "$SAMESTEP_RUN/result.json"',
        '    return "$1"\n}',
    ]


def _step(job: Job) -> str:
    have, python = job.profile, job.python
    contained = [*have.container_command, have.container] if have.container else []
    script = shlex.join(job.words)
    # The launchers of two nodes end together by themselves, and a mask for each process is not for one task.
    options = ["--kill-on-bad-exit=0"] if have.launcher == "samestep" else ["--kill-on-bad-exit=1"]
    options += [f"--cpu-bind={have.cpu_bind}"] if have.cpu_bind and have.launcher == "srun" else []
    options += ["--label"] if have.label else []
    wait = [f"--wait={have.wait}"] if have.wait is not None else []
    if job.scale is not None:
        return shlex.join([python, "-m", "samestep", "scale", *job.scale, *job.words])
    start = shlex.join(["srun", *options, *contained, python])
    if have.launcher == "samestep":
        return f"{start} -m samestep run -n {job.tasks} {shlex.join([*wait, *job.words])}"
    if have.launcher == "torchrun":
        free = 'import socket; print(socket.create_server(("", 0)).getsockname()[1])'
        lines = [
            f"port=$({shlex.join([python, '-c', free])})\n{start}",
            f"-m torch.distributed.run --nnodes={have.nodes} --nproc-per-node={job.tasks}",
            '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID"',
            '--rdzv-endpoint="$(hostname):$port"',
        ]
    elif job.one_run:
        where = shlex.quote(f"file://{job.folder.absolute()}/ranks-")
        lines = [
            f"{start} -m samestep run --nproc-per-node=1 --nodes={have.nodes * job.tasks}",
            f'--node-rank="$SLURM_ARRAY_TASK_ID" --rendezvous={where}"$SLURM_ARRAY_JOB_ID"',
            *wait,
        ]
    else:
        return f"{start} {script}"
    return " \\\n    ".join([*lines, script])


def _directive(value: object) -> str:
    """A word quoted for sbatch, which reads quotes and backslashes in them, but no variables."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
