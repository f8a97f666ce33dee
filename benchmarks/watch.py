"""What pulse and watch cost: the calls of a training step, as a part of a step of 10 ms, and a look of the launcher.

python benchmarks/watch.py: three lines; exit code 1 where the calls of a step take more than 1 % of 10 ms.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import samestep
from samestep.rundir import create_run, pulse_path, read_pulse
from samestep.start.sight import switches
from samestep.train.checkpoint.stopping import CommonStep
from samestep.train.group.world import joined

STEP_S = 0.01
ROUNDS, STEPS = 30, 1000
# The phases of a step in their order; `user` is the script's own code between them.
PHASES = ("data", "user", "forward", "user", "backward", "exchange", "user", "optimizer", "user")


def timed(call) -> float:
    """Median seconds of a call."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(STEPS):
            call()
        rounds.append((time.perf_counter() - begun) / STEPS)
    return statistics.median(rounds)


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        run = create_run(home, {}, {"size": 1})
        os.environ["SAMESTEP_RUN"] = str(run)
        samestep.init()
        group = joined()
        common = CommonStep(group, 0, lambda pace: False)
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            group.pulse.beat(steps)
            for phase in PHASES:
                group.enter(phase)

        def count() -> None:
            nonlocal steps
            steps += 1
            common.reached(steps, now=False)

        def look() -> None:
            read_pulse(pulse_path(Path(run), 0))
            switches(os.getpid())

        pulse, stop, looked = timed(step), timed(count), timed(look)
        common.close()
    part = (pulse + stop) / STEP_S
    print(f"pulse {pulse * 1e6:.1f} us a step: {pulse / STEP_S:.2%} of a step of 10 ms")
    print(f"requests to stop {stop * 1e6:.1f} us a step: {stop / STEP_S:.2%} of a step of 10 ms")
    print(
        f"the launcher's look {looked * 1e6:.0f} us for each rank, twice a second: {looked * 2:.3%} of a core"
    )
    sys.exit(part > 0.01)


if __name__ == "__main__":
    main()
