"""Runs torch's own tests of DistributedDataParallel with `samestep.replicate` in its place, on Gloo and CPU.

The wheel of torch has them (torch.testing._internal.distributed.distributed_test). `python torch_suite.py` runs each
on two processes of its own and writes the table tests/torch_suite.md; `python torch_suite.py NAME …` runs some.
"""

import contextlib
import inspect
import os
import re
import sys
import tempfile
import traceback
import unittest
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from forked import Nest

HERE = Path(__file__)
SIZE = 2
TABLE = HERE.with_suffix(".md")
_SECONDS = 40
_SKIPPED = {
    "74": "needs a GPU",
    "75": "needs a GPU",
    "77": "needs two GPUs",
    "82": "needs three or more ranks",
}
_NOT_OURS = {
    "_get_ddp_logging_data": "reads DDP's logging data",
    "_sync_final_model": "drives uneven inputs by DDP's join",
    "register_comm_hook": "registers a communication hook on DDP; replicate's exchange is its own hook",
    "_register_comm_hook": "registers a communication hook on DDP; replicate's exchange is its own hook",
    "_register_fused_optim": "fuses an optimizer into DDP's backward",
    "_register_builtin_comm_hook": "registers a communication hook on DDP; replicate's exchange is its own hook",
    "_set_ddp_runtime_logging_sample_rate": "reads DDP's logging data",
    "_set_static_graph": "sets DDP's static graph by a private method; replicate(static_graph=True) is the option",
    ".join(": "uses DDP's join for uneven inputs; the loader gives every rank as many batches",
    "Join(": "uses DDP's join for uneven inputs; the loader gives every rank as many batches",
    ".reducer": "reads DDP's reducer",
    "_module_copies": "reads DDP's private attributes",
    "device_ids": "places the model on a GPU",
    "model_DDP.module": "reads the wrapped model by .module",
    "_delay_all_reduce": "sets an option of DDP's that delays all-reduce",
    "mixed_precision": "uses DDP's native mixed precision, which needs a GPU",
    "ddp_model.logger": "reads DDP's logging data",
}


def cases() -> dict[str, Any]:
    """The tests of DistributedDataParallel by name."""
    for name, value in {
        "BACKEND": "gloo",
        "TEMP_DIR": tempfile.gettempdir(),
        "WORLD_SIZE": str(SIZE),
    }.items():
        os.environ.setdefault(name, value)
    from torch.testing._internal.distributed import distributed_test

    base = distributed_test.DistributedTest._DistTestBase
    return {
        name: getattr(base, name)
        for name in sorted(dir(base))
        if re.match(r"test_(ddp|DistributedDataParallel|.*_ddp|static_graph|verify_model)", name)
    }


def run_one(name: str) -> None:
    """On one rank: the test's body, with replicate for DistributedDataParallel."""
    import torch
    import torch.distributed as dist

    import samestep

    world = samestep.init()
    chosen = cases()[name]
    from torch.testing._internal.distributed import distributed_test

    class Replicated:
        """Stands where the tests name DistributedDataParallel."""

        def __new__(
            cls, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any
        ) -> Any:
            # the tests draw their data afterwards, alike on all ranks, and replicate lets each rank draw its own
            stream = torch.get_rng_state()
            model = samestep.replicate(module, **options)
            torch.set_rng_state(stream)
            model.__dict__["module"] = module
            model.__dict__["no_sync"] = partial(samestep.no_sync, model)
            return model

    torch.nn.parallel.DistributedDataParallel = Replicated  # type: ignore[misc, assignment]
    for attribute in ("DistributedDataParallel", "DDP"):
        if hasattr(distributed_test, attribute):
            setattr(distributed_test, attribute, Replicated)

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        world_size = SIZE

    case = Case(name)
    case.rank = world.rank
    case.file_name = tempfile.gettempdir() + "/suite"
    with contextlib.suppress(AttributeError):
        case._init_methods = None
    try:
        getattr(case, name)()
    except unittest.SkipTest as skipped:
        print(f"SKIPPED {skipped}")
    except SystemExit as ended:
        print(f"SKIPPED exit {ended.code}")
    except BaseException as error:
        traceback.print_exc()
        print(
            f"FAILED {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
        sys.stdout.flush()
        os._exit(1)
    else:
        print("PASSED")
    sys.stdout.flush()
    dist.barrier()
    del chosen
    os._exit(0)


def judged(name: str, said: str, source: str) -> tuple[str, str]:
    """Whether a test passed, is not applicable and why, or failed and how."""
    if "PASSED" in said:
        return "passed", ""
    if found := re.search(r"SKIPPED (?:exit )?(.*)", said):
        return "not applicable", _SKIPPED.get(found[1], f"torch skips it on Gloo and CPU ({found[1]})")
    if name == "test_DistributedDataParallel_requires_grad":
        return (
            "not applicable",
            "expects an error for a model without trainable parameters, which replicate takes",
        )
    for word, reason in _NOT_OURS.items():
        if word in source:
            return "not applicable", reason
    found = re.search(r"FAILED (.*)", said)
    return "failed", found[1][:160] if found else "did not end in time"


def main(names: list[str]) -> int:
    everything = cases()
    rows = []
    with tempfile.TemporaryDirectory() as place, Nest(Path(place)) as nest:
        for name in names or everything:
            home = Path(place) / name
            for part in ("barrier", "test_dir", "init_dir"):
                (home / part).mkdir(parents=True)
            ranks = nest.start(
                HERE, SIZE, "--one", name, cwd=home, env={"BACKEND": "gloo", "TEMP_DIR": str(home)}
            )
            codes = nest.wait(ranks, _SECONDS)
            for rank in ranks:
                rank.kill()
            nest.wait(ranks, 5)
            outputs = [rank.said for rank in ranks]
            # a rank that dies or hangs prints nothing, and another may have passed before it
            silent_or_failed = [output for output in outputs if not re.search("PASSED|SKIPPED", output)]
            ended = "" if codes == [0] * SIZE else f"FAILED its end: exit codes {codes}"
            worst = (silent_or_failed or [ended or outputs[0]])[0]
            rows.append((name, *judged(name, worst, inspect.getsource(inspect.unwrap(everything[name])))))
            print(*rows[-1], sep="  ", flush=True)
            if names and rows[-1][1] == "failed":
                print(*outputs, sep="\n---\n")
    counts = {kind: sum(row[1] == kind for row in rows) for kind in ("passed", "not applicable", "failed")}
    print(counts)
    if not names:
        lines = [
            "| test | result | reason |",
            "|---|---|---|",
            *(f"| `{a}` | {b} | {c} |" for a, b, c in rows),
        ]
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        TABLE.write_text(f"{_HEAD}\n{summary}.\n\n" + "\n".join(lines) + "\n")
    return counts["failed"]


_HEAD = """\
# torch's own DDP tests, with `replicate` in the place of `DistributedDataParallel`

`make torch-suite` runs the DDP tests that the wheel of torch ships, each on two processes with Gloo on CPU, and writes
this table. The random stream is put back after each `replicate`, after which each rank draws its own numbers.
"""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]) > 0)
