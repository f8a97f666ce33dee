"""`samestep export` writes the plain weights of a checkpoint, for programs that do not use samestep."""

from pathlib import Path
from typing import Any, BinaryIO

import click

from samestep.cli.output import verb, working
from samestep.errors import CheckpointError, UsageError
from samestep.files import write_atomically
from samestep.text import printable, type_of


@verb("samestep export")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--part", default="model", show_default=True, help="Part of the state; a dot separates levels.")
@click.option("--force", is_flag=True, help="Replace the output file.")
def command(source: Path, output: Path, part: str, force: bool) -> None:
    """Write the weights in SOURCE, a checkpoint, a directory of them or plain weights, to a .safetensors or .pt file.

    \b
    samestep export runs/checkpoints -o model.safetensors
    samestep export runs/checkpoints -o weights.pt --part ema.model
    """
    if output.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"{output} ends in neither .safetensors nor .pt; choose one of them")
    if output.exists() and not force:
        raise UsageError(f"{output} exists; write --force to replace it")
    from samestep.compare import weights
    from samestep.train.checkpoint.save import without_prefix

    try:
        with working(f"writing {output}"):
            loaded = weights.read(source)
            chosen = without_prefix(_part(loaded.state, part))
            write_atomically(output, lambda file: _write(file, chosen, part, output.suffix))
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else printable(error)
        raise CheckpointError(f"{output} cannot be written ({reason})", path=output) from error
    for note in loaded.notes:
        click.echo(note, err=True)
    click.echo(f"{output}: {part} of {loaded.file}")


def _part(state: Any, part: str) -> Any:
    for name in part.split("."):
        known = {str(key): value for key, value in state.items()} if isinstance(state, dict) else {}
        if name not in known:
            if part == "model" and known and all(hasattr(value, "data_ptr") for value in known.values()):
                return known  # a file of plain weights
            names = printable(", ".join(known)) or "nothing by name"
            raise UsageError(f"{part} is not in this checkpoint, which holds {names}; choose with --part")
        state = known[name]
    return state


def _write(file: BinaryIO, chosen: Any, part: str, suffix: str) -> None:
    import safetensors.torch
    import torch

    if suffix == ".pt":
        torch.save(chosen, file)
        return
    tensors: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    for key, value in chosen.items() if isinstance(chosen, dict) else [("", chosen)]:
        if not isinstance(value, torch.Tensor):
            name = printable(f"{part}.{key}".rstrip("."))
            raise UsageError(f"{name} is {type_of(value)}, and safetensors hold tensors; write a .pt")
        # safetensors refuses tensors that share memory
        tensors[str(key)] = value.clone() if value.data_ptr() in written else value
        written.add(value.data_ptr())
    try:
        file.write(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"safetensors cannot hold {part} ({printable(error)}); write a .pt") from error
