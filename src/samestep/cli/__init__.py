"""The command line: a file for each command, loaded on use; `--help` imports neither torch nor click."""

import os
import sys

import samestep

_EXAMPLES = {
    "samestep demo": "a small network at 1 and 2 processes",
    "samestep run -n 2 train.py --epochs 3": "your script on 2 processes here",
    "samestep submit --dry-run train.py": "the Slurm job that would run it",
}
_VERBS = {
    "Run": {
        "run": "Run a script on N processes of this machine, or of several.",
        "submit": "Submit a script as a Slurm job.",
        "profiles": "List the profiles of Slurm jobs, or explain one.",
        "stop": "Ask a run to commit its state and end.",
        "demo": "Train a small network at 1 and 2 processes and compare.",
    },
    "Convert and check": {
        "convert": "Print the patch that makes a serial script data-parallel.",
        "verify": "Test whether a script takes the same step at any number of processes.",
        "compare": "Show which tensors differ between weights files, and by how much.",
    },
    "Look and measure": {
        "runs": "List the runs here: state, step, speed.",
        "status": "Show what each rank of a run does.",
        "logs": "Show a run's output by rank; -f follows it.",
        "env": "Print this process's rank and size, and where they come from.",
        "checkpoints": "List the checkpoints in a directory: step, time, size, script.",
        "export": "Write the plain weights of a checkpoint as .safetensors or .pt.",
        "scale": "Measure how fast a script is on N processes, and what limits it.",
        "profile": "Record some steps of all ranks as a trace for Perfetto or Chrome.",
    },
    "Shell": {
        "completion": "Complete commands and options in bash, zsh or fish.",
    },
}
# names of other tools, and our command
_MEANT = dict.fromkeys(("launch", "torchrun", "python", "start", "train", "mpirun", "srun"), "run") | {
    "ls": "runs", "list": "runs", "ps": "status", "kill": "stop", "cancel": "stop", "scancel": "stop",
    "test": "verify", "sbatch": "submit", "bench": "scale", "diff": "compare",
}  # fmt: skip
COMMANDS = {verb: what for verbs in _VERBS.values() for verb, what in verbs.items()}


def main(args: list[str] | None = None) -> None:
    """Run the command at the beginning of args (or of the command line); Ctrl-C ends it with a single line."""
    try:
        _main(args)
    except KeyboardInterrupt:
        print("samestep: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # as in `samestep --help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left goes there when Python ends
        sys.exit(1)
    except OSError as error:  # as where stdout is a file on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"samestep: the output cannot be written ({error.strerror})", file=sys.stderr)
        sys.exit(1)


def _main(args: list[str] | None) -> None:
    if request := os.environ.get("_SAMESTEP_COMPLETE"):  # set by a shell's completion
        sys.exit(__import__("samestep.cli.completion", fromlist=["complete"]).complete(request))
    verb, *rest = (sys.argv[1:] if args is None else args) or ["--help"]
    if verb == "help" and rest:
        verb, rest = rest[0], ["--help"]
    if verb in COMMANDS:
        # not import_module, which imports warnings: that takes a fifth of the time of --help
        __import__(f"samestep.cli.{verb}", fromlist=["command"]).command.main(rest, f"samestep {verb}")
    elif verb in ("-h", "--help", "help"):
        groups = (f"{group}:\n{_aligned(verbs)}" for group, verbs in _VERBS.items())
        more = "`samestep run --help` explains run, and so on for each command."
        print("\n\n".join([_aligned(_EXAMPLES), *groups, more]), flush=True)
    elif verb in ("--version", "-V", "version"):
        print(f"samestep {samestep.__version__}", flush=True)
    else:
        print(f"samestep has no command {verb!r}; {_meant(verb)}", file=sys.stderr)
        sys.exit(2)


def _meant(verb: str) -> str:
    if verb.endswith(".py") or verb.startswith("-"):
        return f"`samestep run {verb}` runs a script"
    if verb in _MEANT:
        return f"it is `samestep {_MEANT[verb]}` here"
    from difflib import get_close_matches  # imported late: it takes as long as all of --help

    near = get_close_matches(verb, COMMANDS, 1)
    return f"did you mean `samestep {near[0]}`?" if near else "see `samestep --help`"


def _aligned(lines: dict[str, str]) -> str:
    if sys.stdout and sys.stdout.isatty() and (columns := os.get_terminal_size().columns) < 80:
        from textwrap import fill  # imported late for the same reason

        below = " " * 6
        return "\n".join(
            f"  {left}\n{fill(right, columns, initial_indent=below, subsequent_indent=below)}"
            for left, right in lines.items()
        )
    return "\n".join(f"  {left:{max(map(len, lines))}}  {right}" for left, right in lines.items())
