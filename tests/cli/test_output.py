"""How every command ends where its arguments cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli import main


@pytest.mark.parametrize(
    "args",
    [
        "run",
        "run -n",
        "run --bogus train.py",
        "run --devices= train.py",
        "run --max-restarts x train.py",
        "run --shutdown-timeout nan train.py",
        "run --nodes 2 --node-rank 0 --rendezvous env:// train.py",
        "scale --repat 3 train.py",
        "scale --predict 8 --link 1.2.3GB/s,5us train.py",
        "submit --scale ' train.py",
        "completion ksh",
        "compare --tolerance nan a b",
        "export a -o b",
        "status ''",
        "env extra",
    ],
)
def test_a_wrong_argument_ends_with_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, args):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as ended:
        main([word.replace("''", "") for word in args.split()])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("samestep")
    assert err.count("\n") == 1
    assert ";" in err  # what to write comes after what is wrong
    assert os.listdir() == ["train.py"]


def test_a_full_disk_under_the_output_is_said_in_one_sentence(tmp_path):
    with Path("/dev/full").open("wb", buffering=0) as full:
        command = [sys.executable, "-m", "samestep", "runs"]
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50
        )
    assert done.returncode == 1
    assert done.stderr.startswith("samestep runs: the output cannot be used (no space left on device)\n")
