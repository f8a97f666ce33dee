"""`python tests/cluster [command…]`: a shell (or one command) on a cluster made for it."""

import os
import subprocess
import sys

from fournodes import NODES, Cluster

with Cluster() as cluster:
    words = sys.argv[1:]
    if not words:
        print(f"nodes {', '.join(NODES)}; partitions main, urgent; logs in {cluster.state}")
        print("try `sinfo`, `srun -N4 hostname`, `samestep submit --dry-run …`; exit takes it all down")
    done = subprocess.run(cluster.command(*(words or [os.environ.get("SHELL", "bash")])))
sys.exit(done.returncode)
