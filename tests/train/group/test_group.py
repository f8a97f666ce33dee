"""A group can be closed and opened again in one process, at another size, without a trace of the one before."""

from textwrap import dedent

import pytest

LEAKS = """
    import gc, os, sys, time, weakref
    from pathlib import Path
    import psutil, torch, samestep
    from samestep.rendezvous.listen import hold_port
    from samestep.train.group import world as group

    rank, home, exact = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2] == "exact"
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4))
    me = psutil.Process()

    def meet(number, size):
        note = home / f"port-{number}"
        if rank == 0:
            held, port = hold_port()
            note.with_suffix(".new").write_text(str(port))
            note.with_suffix(".new").rename(note)
        else:
            held = None
            while not note.exists():
                time.sleep(0.005)
        facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(fact) for name, fact in facts.items()} | {"MASTER_PORT": note.read_text()})
        return held

    def train(size):
        torch.manual_seed(0)
        model = samestep.replicate(torch.nn.Linear(4, 3), exact=exact)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in samestep.steps(data, 6, microbatch=2, shuffle=True):
            for (x,) in step:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert samestep.sum(1) == size
        return model.weight.sum().item()

    seen, results, groups = [], set(), []
    for number in range(20):
        size = (2, 3, 1)[number % 3]
        if rank >= size:
            continue
        before = dict(os.environ)
        held = meet(number, size)
        joined = dict(os.environ)
        assert samestep.init().size == size
        torch.set_num_threads(2)
        results.add(train(size))
        groups.append(weakref.ref(group.joined()))
        group.close()
        held and held.close()
        assert dict(os.environ) == joined, "variables of a closed group were left"
        assert torch.get_num_threads() == 2
        seen.append((me.num_threads(), me.num_fds(), len(me.net_connections()), me.memory_info().rss))
    settled = seen[len(seen) // 2 - 1]
    gc.unfreeze()
    gc.collect()
    assert not any(reference() for reference in groups), "a closed group is kept"
    print(*settled, *seen[-1], sep=",")
    assert max(results) - min(results) <= (0 if exact else 1e-6 * abs(max(results))), results
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "exact"])
def test_a_group_is_opened_and_closed_20_times_at_changing_sizes_without_a_leak(nest, tmp_path, mode):
    script = tmp_path / "train.py"
    script.write_text(dedent(LEAKS))
    ranks = nest.start(script, 3, tmp_path, mode)
    codes, said = nest.wait(ranks), [rank.said for rank in ranks]
    assert codes == [0, 0, 0], said
    for text in said:
        counts = list(map(int, text.splitlines()[-1].split(",")))
        assert counts[4:7] <= counts[:3], text
        assert counts[7] - counts[3] < 3 << 20, text
