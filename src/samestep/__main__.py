"""`python -m samestep` is the `samestep` command of that Python."""

from samestep.cli import main

main()
