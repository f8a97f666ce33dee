"""Writes a Slurm batch script of one page for a job, and submits it with sbatch."""

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
from samestep.start.scan import may_stop_early
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
        "[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]+(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE",
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
    """A script, and the profile with which Slurm runs it."""

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
        """The job's name; by default the script's."""
        return self.name or (self.script.rpartition(".")[2] if self.module else Path(self.script).stem)

    @property
    def folder(self) -> Path:
        """The folder of the batch script and the output."""
        return Path(self.run_dir or "runs")

    @property
    def tasks(self) -> int:
        return self.profile.tasks_per_node or self.profile.gpus_per_node or 1

    @property
    def cores(self) -> int | None:
        """Cores for each process: as given, or its share of the node's."""
        profile = self.profile
        if profile.cpus_per_task is not None or not profile.cores:
            return profile.cpus_per_task
        by_gpus = profile.gpus and profile.gpus_per_node
        share = profile.cores * by_gpus // profile.gpus if by_gpus else profile.cores
        return max(1, share // self.tasks)

    @property
    def python(self) -> str:
        """The Python that runs the script: this process's, unless the job loads another."""
        profile = self.profile
        loads_python = profile.modules or profile.setup or profile.container
        return profile.python or ("python" if loads_python else sys.executable)

    @property
    def words(self) -> list[str]:
        """The script and its arguments, as Python gets them."""
        return [*(["-m"] if self.module else []), self.script, *self.args]

    @property
    def keeps_run(self) -> bool:
        """Whether the batch script makes the run's directory, beside the output."""
        return self.profile.launcher == "srun" and not self.one_run and self.scale is None

    @property
    def output(self) -> str:
        """The output file with sbatch's placeholders; an --output option of the user comes first."""
        own = [option for option in self.profile.options if option.startswith(_OUTPUT)]
        if own:
            return own[-1].removeprefix(_OUTPUT)
        number = "%A_%a" if self.array or self.one_run else "%j"
        return f"{str(self.folder).replace('%', '%%')}/%x_{number}.out"


def batch_script(job: Job, command: Sequence[str]) -> str:
    """The batch script of a job; `command` is the command line that requested it."""
    _check_words(job, command)
    _check_sense(job)
    _check_way(job)
    directives = [f"#SBATCH --{name}={_directive(value)}" for name, value in _options(job)]
    keep = "--requeue" if job.profile.requeue else "--no-requeue"
    options = [option for option in job.profile.options if not option.startswith(_OUTPUT)]
    options += ["--exclusive"] if job.profile.exclusive else []
    flags = [f"#SBATCH {_directive(option)}" for option in (keep, *options)]
    lines = ["#!/bin/bash", *directives, *flags, f"# {shlex.join(command)}", "", *_surroundings(job)]
    lines += [_step(job), "code=$?"]
    if job.profile.launcher == "torchrun":
        lines += ['if [ -e "$SAMESTEP_STOPPED" ]; then rm "$SAMESTEP_STOPPED"; code=75; fi']
    if job.keeps_run:
        lines += ['note_end "$code"']
    requeue = 'scontrol requeue "$SLURM_JOB_ID" || ' if job.profile.requeue else ""
    goes_on = ' && [ ! -e "$SAMESTEP_RUN/stop" ]' if job.keeps_run else ""
    lines += [f'if [ "$code" -eq {CHECKPOINTED} ]{goes_on}; then\n    {requeue}echo "{_AGAIN}"\nfi']
    return "\n".join([*lines, 'exit "$code"', ""])


def write_script(job: Job, command: Sequence[str]) -> Path:
    """Write the batch script beside the job's output; returns its path."""
    script = batch_script(job, command).encode(errors="surrogateescape")
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
    """Refuse more nodes than the partition has: the job would wait in the queue for ever."""
    chosen = [f"--partition={profile.partition}"] if profile.partition else []
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["sinfo", "-h", "-o%P %D", *chosen], capture_output=True, text=True, timeout=10)
        rows = [line.split() for line in done.stdout.splitlines()]
        # a star marks the partition of jobs that name none
        nodes = [(name, int(number)) for name, number in rows if chosen or name.endswith("*")]
        available = sum(number for _, number in nodes)
        if nodes and available < profile.nodes:
            name = nodes[0][0].rstrip("*")
            raise UsageError(
                f"nodes {profile.nodes} is more than the {available} of partition {name}; use at most {available}"
            )


def submit(path: Path) -> str:
    """Submit the script with sbatch; returns the job's id."""
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
    """Slurm's state of a job, such as "running", "pending" or "cancelled"; None if Slurm does not answer."""
    if not re.fullmatch("[0-9]+", number):
        return None
    scontrol, sacct = f"scontrol show job -o {number}", f"sacct -nPX -o State -j {number}"
    for command, form in ((scontrol, "JobState=([A-Z_]+)"), (sacct, "^([A-Z_]+)")):
        with suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(command.split(), capture_output=True, text=True, timeout=10).stdout
            if match := re.search(form, answer):
                state = match[1].lower().replace("_", " ")
                return "running" if state == "completing" else state
    return None


def output_of(job: Job, number: str) -> str | None:
    """The output file of job `number` (of its first array element); None if it is not known before the job runs."""
    first = re.split("[^0-9]", job.array)[0] if job.array else "0"
    filled = {"%%": "%", "%x": job.title, "%j": number, "%A": number, "%a": first}
    if set(re.findall("%.?", job.output)) - set(filled):
        return None
    return re.sub("%.", lambda match: filled[match[0]], job.output)


def _check_words(job: Job, command: Sequence[str]) -> None:
    profile, env = job.profile, job.profile.env or {}
    options = {name.replace("_", "-"): value for name, value in vars(profile).items() if type(value) is str}
    of_job = {"script": job.script, "name": job.title, "array": job.array or "0", "run-dir": str(job.folder)}
    single = {name: value for name, value in options.items() if name not in ("about", "source")} | of_job
    container = [("container-command", word) for word in profile.container_command]
    words = [*single.items(), *(("module", name) for name in profile.modules), *container[:1]]
    forms = [*(("option", option) for option in profile.options), *(("env", name) for name in env)]
    texts = [*container, *(("argument", word) for word in (*command, *job.args))]
    texts += [*(("setup", line) for line in profile.setup), *((f"env {name}", env[name]) for name in env)]
    for name, value in (*words, *texts, *forms):
        for character, noun in _ENDS_OF_LINES.items():
            if character in value:
                raise UsageError(f"{name} {value!r} holds {noun}, which would end its line; leave it out")
    for name, value in words:
        if not value or value.startswith("-"):
            why = "would be read as another option" if value else "is empty"
            raise UsageError(f"{name} {value!r} {why}; begin it with a letter")
    for name, value in (*words, *forms):
        form, wrong = _FORMS.get(name, (".*", ""))
        if not re.fullmatch(form, value):
            raise UsageError(f"{name} {value!r} is {wrong}")


def _check_sense(job: Job) -> None:
    profile = job.profile
    if "\\" in str(job.folder):
        raise UsageError(
            f"run-dir {str(job.folder)!r} has a backslash, which sbatch takes for its own; leave it out"
        )
    if "/" in job.title:
        raise UsageError(f"name {job.title!r} would be read as a directory; leave the / out")
    if profile.gpus and profile.gpus_per_node > profile.gpus:
        wanted = f"gpus-per-node {profile.gpus_per_node} is more than the {profile.gpus} of such a node"
        raise UsageError(f"{wanted}; use at most {profile.gpus}, or more nodes")
    for first, last in re.findall("([0-9]+)-([0-9]+)", job.array or ""):
        if int(first) > int(last):
            raise UsageError(f"array {job.array!r} counts down from {first} to {last}; write {last}-{first}")
    if not profile.nodes:
        raise UsageError("nodes 0 leaves no node to run on; use at least 1")


def _check_way(job: Job) -> None:
    profile = job.profile
    for name, known in (("launcher", LAUNCHERS), ("gpu_option", GPU_OPTIONS)):
        if (value := getattr(profile, name)) not in known:
            raise UsageError(f"{name.replace('_', '-')} {value!r} is unknown; write {' or '.join(known)}")
    if job.one_run and (job.array or profile.launcher != "srun"):
        other = f"array {job.array}" if job.array else f"launcher {profile.launcher}"
        raise UsageError(f"array-ranks makes its own array of single processes; leave {other} out")
    is_other = job.array or job.one_run or profile.container or profile.launcher != "srun"
    if job.scale is not None and is_other:
        raise UsageError("scale starts its runs itself; leave --array, --container and --launcher out")


def _options(job: Job) -> Iterator[tuple[str, object]]:
    profile = job.profile
    nodes, tasks = (1, 1) if job.one_run else (profile.nodes, job.tasks)
    # The other launchers start a node's processes from a single task, which gets the cores of all of them.
    share = 1 if profile.launcher == "srun" else tasks
    gpus = profile.gpus_per_node // job.tasks if job.one_run else profile.gpus_per_node
    requests = {
        "job-name": job.title,
        "nodes": nodes,
        "ntasks-per-node": tasks // share,
        profile.gpu_option: gpus and (f"gpu:{gpus}" if profile.gpu_option == "gres" else gpus),
        "cpus-per-task": job.cores and job.cores * share,
        **{name.replace("_", "-"): getattr(profile, name) for name in _PASSED_ON},
        "array": f"0-{profile.nodes * job.tasks - 1}" if job.one_run else job.array,
        "output": job.output,
        "open-mode": "append",
        "signal": profile.signal or _early_signal(job),
    }
    yield from ((name, value) for name, value in requests.items() if value)


def _early_signal(job: Job) -> str | None:
    """USR1 two minutes before the end, later in a short job; Slurm may send it up to a minute earlier."""
    limit = job.profile.time
    early = min(120, _seconds(limit) // 2 - 60) if limit else 120
    # it would only end a script that does not expect it, and torchrun, which does not forward it
    expects = job.scale is None and job.profile.launcher != "torchrun" and may_stop_early(Path(job.script))
    return f"USR1@{early}" if early > 0 and expects else None


def _seconds(limit: str) -> int:
    if not limit[0].isdigit():
        return sys.maxsize
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # After days, Slurm reads hours first; without days, one number is minutes and two are minutes and seconds.
    hours, minutes, seconds = (*parts, 0, 0)[:3] if days or len(parts) == 3 else (0, *parts, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _surroundings(job: Job) -> list[str]:
    profile, cores = job.profile, job.cores
    exports = {"SRUN_CPUS_PER_TASK": cores, "OMP_NUM_THREADS": cores} if cores else {}
    if cores and profile.launcher != "srun":
        exports["SRUN_CPUS_PER_TASK"] = cores * job.tasks
    ours = {**exports, "SAMESTEP_RUN_DIR": job.run_dir, "SAMESTEP_ADDRESS_SUFFIX": profile.address_suffix}
    variables = {name: str(value) for name, value in ours.items() if value} | dict(profile.env or {})
    modules = [*([profile.architecture] if profile.architecture else []), *profile.modules]
    lines = ["module purge", f"module load {shlex.join(modules)}"] if modules else []
    note = "|| note_end $? " if job.keeps_run else ""
    lines = [*_begin_run(job), *(f"{line} {note}|| exit" for line in (*lines, *profile.setup))]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if profile.launcher == "torchrun":  # torchrun turns a worker's exit code 75 into 1; a file replaces it
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
    profile, python = job.profile, job.python
    contained = [*profile.container_command, profile.container] if profile.container else []
    script = shlex.join(job.words)
    # samestep's launchers stop each other; --cpu-bind is meant for one process per task.
    options = ["--kill-on-bad-exit=0"] if profile.launcher == "samestep" else ["--kill-on-bad-exit=1"]
    options += [f"--cpu-bind={profile.cpu_bind}"] if profile.cpu_bind and profile.launcher == "srun" else []
    options += ["--label"] if profile.label else []
    wait = [f"--wait={profile.wait}"] if profile.wait is not None else []
    if job.scale is not None:
        return shlex.join([python, "-m", "samestep", "scale", *job.scale, *job.words])
    start = shlex.join(["srun", *options, *contained, python])
    if profile.launcher == "samestep":
        return f"{start} -m samestep run -n {job.tasks} {shlex.join([*wait, *job.words])}"
    if profile.launcher == "torchrun":
        free = 'import socket; print(socket.create_server(("", 0)).getsockname()[1])'
        lines = [
            f"port=$({shlex.join([python, '-c', free])})\n{start}",
            f"-m torch.distributed.run --nnodes={profile.nodes} --nproc-per-node={job.tasks}",
            '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID"',
            '--rdzv-endpoint="$(hostname):$port"',
        ]
    elif job.one_run:
        where = shlex.quote(f"file://{job.folder.absolute()}/ranks-")
        lines = [
            f"{start} -m samestep run --nproc-per-node=1 --nodes={profile.nodes * job.tasks}",
            f'--node-rank="$SLURM_ARRAY_TASK_ID" --rendezvous={where}"$SLURM_ARRAY_JOB_ID"',
            *wait,
        ]
    else:
        return f"{start} {script}"
    return " \\\n    ".join([*lines, script])


def _directive(value: object) -> str:
    """A word quoted for sbatch, which understands quotes and backslashes, but no variables."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
