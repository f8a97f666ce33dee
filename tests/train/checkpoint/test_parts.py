"""What a checkpoint is made of: parts, datasets and files that are odd, and several checkpoints at once."""

import re
import shutil

import pytest

from samestep.state import file


def steps(directory):
    return [entry.step for entry in file.listing(directory)]


@pytest.mark.slow
def test_what_cannot_be_carried_is_said_before_the_first_step(run, tmp_path):
    source = """
        from samestep.train.checkpoint import capture
        class Image(torch.Tensor): pass
        for value in (torch.ones(2).as_subclass(Image), torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
            try:
                capture.bulk({"seen": value})
            except samestep.UsageError as error:
                print(error)
        class Odd:
            def state_dict(self): return {"seen": {1, 2}}
            def load_state_dict(self, state): pass
        samestep.Checkpoint(sys.argv[1], model=model, odd=Odd()).resume()
    """
    codes, said = run(source, 2, tmp_path / "commits")
    assert codes == [1, 1]
    assert all("UsageError: odd.seen is a set, which a checkpoint cannot carry" in text for text in said)
    for kind in (
        "an? Image; give the plain",
        "a sparse_coo float32 tensor on cpu",
        "a strided float32 tensor on meta",
    ):
        assert re.search(f"^seen is {kind}", said[0], re.MULTILINE), said[0]


@pytest.mark.slow
def test_a_dataset_that_draws_with_a_generator_of_its_own_is_the_same_after_a_resume(run, tmp_path):
    source = """
        class Noisy:
            own = torch.Generator().manual_seed(0)
            def __len__(self): return 12
            def __getitem__(self, index): return torch.rand(4, generator=self.own)
        train = samestep.loader(Noisy(), 3, num_workers=0)
        checkpoint = samestep.Checkpoint(sys.argv[1], every=1, model=model, train=train)
        print(checkpoint.resume())
        for x in train:
            checkpoint.step()
            if checkpoint.steps in (1, 4):
                checkpoint.finish()
                break
    """
    assert run(source, 1, tmp_path / "commits")[0] == [0]
    codes, (said,) = run(source, 1, tmp_path / "commits")
    assert codes == [0], said
    assert re.search(
        "going on after step 1 .*; train has done 0 epochs and 1 of 4 batches of the next; what the loop adds up "
        r"over an epoch, as in total \+= loss.item\(\), lacks these unless a part keeps it\n",
        said,
    )
    codes, (said,) = run(source, 1, tmp_path / "commits")
    assert re.search(
        "step 4 .* 0 epochs and 4 of 4 batches of the next, so the loop over them is empty\n", said
    )


def test_a_stop_commits_every_checkpoint(run, tmp_path):
    source = """
        import signal
        runs = [samestep.Checkpoint(sys.argv[1] + name, every=1000, model=model, train=train) for name in "ab"]
        for checkpoint in runs:
            checkpoint.resume()
        for _ in train.epochs(3):
            for x, in train:
                if runs[0].steps == 2 and world.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
                for checkpoint in runs:
                    checkpoint.step()
    """
    codes, said = run(source, 2, f"{tmp_path}/")
    assert codes == [75, 75], said
    assert len(steps(tmp_path / "a")) == len(steps(tmp_path / "b")) == 1
    codes, said = run(source.replace("== 2", "== -1"), 2, f"{tmp_path}/")
    assert codes == [0, 0], said
    assert "".join(said).count("going on after step") == 2


def test_a_run_that_resumes_takes_the_time_of_reading_for_that_of_a_commit(run, tmp_path):
    source = """
        checkpoint = samestep.Checkpoint(sys.argv[1], every=1, model=model, train=train)
        from samestep.train.checkpoint import capture
        read = capture.read
        capture.read = lambda name, dir_fd: (time.sleep(1.5), read(name, dir_fd))[1]
        if checkpoint.resume():
            print("a commit takes", checkpoint._commit_seconds)
        for x, in train:
            checkpoint.step()
            break
    """
    assert run(source, 1, tmp_path / "commits")[0] == [0]
    _, (said,) = run(source, 1, tmp_path / "commits")
    assert "a commit takes 1.5" in said


def test_the_state_of_an_optimizer_is_laid_out_like_its_parameters_after_a_resume(run, tmp_path):
    source = """
        net = torch.nn.Conv2d(18, 54, (1, 6)).to(memory_format=torch.channels_last)
        adam = torch.optim.AdamW(net.parameters(), fused=True)
        checkpoint = samestep.Checkpoint(sys.argv[1], every=1, net=net, adam=adam)
        done = checkpoint.resume()
        torch.manual_seed(done)
        for _ in range(done, done + 2):
            net(torch.randn(2, 18, 1, 6)).square().sum().backward()
            adam.step()
            adam.zero_grad()
        if not done:
            checkpoint.step()
            checkpoint.finish()
        strides = {adam.state[net.weight][name].stride() for name in ("exp_avg", "exp_avg_sq")}
        assert strides == {net.weight.stride()}, strides
        print(net.weight.double().sum().item())
    """
    straight = source.replace("if not done", "if False").replace("range(done, done + 2)", "range(4)")
    straight = straight.replace("torch.manual_seed(done)", "pass").replace(
        "net(torch", "torch.manual_seed(0 if _ == 0 else 1) if _ in (0, 2) else None\n            net(torch"
    )
    assert run(source, 1, tmp_path / "commits")[0] == [0]
    codes, (said,) = run(source, 1, tmp_path / "commits")
    assert codes == [0], said
    assert run(straight, 1, tmp_path / "none")[1][0].splitlines()[-1] == said.splitlines()[-1]


def test_checkpoints_of_one_name_are_two_also_where_a_measurement_keeps_them_elsewhere(run, tmp_path):
    source = """
        for name in ("a", "b"):
            samestep.Checkpoint(f"{sys.argv[1]}/{name}/commits", model=model).commit(wait=True)
    """
    codes, said = run(source, 1, tmp_path / "own", env={"SAMESTEP_CHECKPOINTS": str(tmp_path / "elsewhere")})
    assert codes == [0], said
    assert not (tmp_path / "own").exists()
    assert len(list((tmp_path / "elsewhere").rglob("*.samestep"))) == 2
    assert len(list((tmp_path / "elsewhere").rglob("commits"))) == 2


def test_a_commit_is_written_also_where_no_thread_can_be_started(run, tmp_path):
    source = """
        import threading
        def refuse(thread):
            raise RuntimeError("can't start new thread")
        checkpoint = samestep.Checkpoint(sys.argv[1], every=1, model=model, train=train)
        checkpoint.resume()
        threading.Thread.start = refuse
        for x, in train:
            checkpoint.step()
    """
    codes, said = run(source, 1, tmp_path / "commits")
    assert codes == [0], said
    assert steps(tmp_path / "commits") == [4, 3]


@pytest.mark.slow
def test_a_dict_keeps_the_sums_of_every_rank_in_the_middle_of_an_epoch_and_at_its_last_step(run, tmp_path):
    source = """
        seen = {"step": 0, "loss": 0.0, "best": {"loss": None, "epochs": []}, "hits": torch.zeros(2)}
        best = seen["best"]
        directory, last = sys.argv[1], int(sys.argv[2])
        checkpoint = samestep.Checkpoint(
            directory, every=1, model=model, optimizer=optimizer, train=train, seen=seen
        )
        checkpoint.resume()
        for epoch in train.epochs(2):
            for x, in train:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen["step"] += 1
                seen["loss"] += loss.item() * len(x)
                seen["hits"] += x[0, :2]
                checkpoint.step()
                if seen["step"] == last:
                    checkpoint.finish()
                    sys.exit()
            mean = samestep.sum(seen["loss"]) / 12
            best["loss"] = mean if best["loss"] is None else min(mean, best["loss"])
            best["epochs"].append(epoch)
            print("epoch", epoch, mean, best, seen["step"], seen["hits"])
            seen["loss"] = 0.0
    """

    def printed(size, last, name):
        codes, said = run(source, size, tmp_path / f"{name}{size}", last)
        assert codes == [0] * size, said
        return [re.findall("^epoch .*", text, re.MULTILINE) for text in said], said[0]

    for size in (1, 2):
        whole, _ = printed(size, -1, "whole")
        assert len(whole[0]) == 2
        assert printed(size, 3, "cut")[0] == [[]] * size
        first, said = printed(size, 4, "cut")
        assert said.endswith("; train has done 0 epochs and 3 of 4 batches of the next\n")
        assert first == [[]] * size
        second, said = printed(size, 6, "cut")
        assert said.splitlines()[0].endswith(
            "; train has done 0 epochs and 4 of 4 batches of the next, so the loop over them is empty"
        )
        rest, _ = printed(size, -1, "cut")
        assert [a + b for a, b in zip(second, rest, strict=True)] == whole
    printed(2, 3, "other")
    shutil.move(tmp_path / "other2", tmp_path / "other1")
    codes, (said,) = run(source, 1, tmp_path / "other1", -1)
    assert codes == [1]
    assert "seen has other values on each of its 2 ranks, and this run has 1; go on with 2" in said


def test_a_dict_takes_its_values_to_another_number_of_ranks_where_they_are_alike(run, tmp_path):
    source = """
        seen = {"steps": 0, 7: (1, b"two"), "nan": float("nan"), "empty": torch.ones(0, 3)}
        for parts in ({"seen": {"best": world}}, {"optimizer": optimizer.state_dict()}):
            try:
                samestep.Checkpoint(sys.argv[1], **parts)
            except samestep.UsageError as error:
                print(error)
        checkpoint = samestep.Checkpoint(sys.argv[1], model=model, seen=seen)
        if checkpoint.resume():
            print(seen)
        seen.update(steps=torch.tensor([2.5]).numpy().sum(), **{"half": torch.tensor([0.1]).half()})
        checkpoint.step()
        checkpoint.commit(wait=True)
        seen["odd"] = {"set": {1}}
        checkpoint.commit()
    """
    for size in (2, 3):
        codes, said = run(source, size, tmp_path / "commits")
        assert codes == [1] * size
        assert "UsageError: seen.odd.set is a set, which a checkpoint cannot carry" in said[0]
        assert said[0].startswith("seen.best is a World, which a checkpoint cannot carry")
        assert "\nCheckpoint cannot keep optimizer, a dict without state_dict and load_state_dict" in said[0]
    kept = "{'steps': 2.5, 7: (1, b'two'), 'nan': nan, 'empty': tensor([], size=(0, 3)), 'half': tensor([0.1000], "
    assert all(kept in text for text in said), said


def test_what_a_dict_holds_is_updated_in_place_and_a_models_own_weights_are_not(run, tmp_path):
    source = """
        history, hits, rates = [], torch.zeros(2), {"warm": 1.0, "main": 2.0}
        seen = {"history": history, "hits": hits, "rates": rates, "first": True, "best": model.state_dict()}
        checkpoint = samestep.Checkpoint(sys.argv[1], seen=seen, model=model)
        if checkpoint.resume():
            print(history, hits, rates, list(seen), seen["best"]["bias"], model.bias.tolist())
            sys.exit()
        history.append((1, torch.ones(1)))
        hits += 3
        rates["main"] = rates.pop("warm")
        rates["new"] = 0.5
        del seen["first"]
        seen["best"] = {name: torch.full_like(weight, 7.0) for name, weight in seen["best"].items()}
        with torch.no_grad():
            model.bias.fill_(9.0)
        checkpoint.step()
        checkpoint.commit(wait=True)
    """
    assert run(source, 1, tmp_path / "commits")[0] == [0]
    codes, (said,) = run(source, 1, tmp_path / "commits")
    assert codes == [0], said
    assert said.splitlines()[-1] == (
        "[(1, tensor([1.]))] tensor([3., 3.]) {'main': 1.0, 'new': 0.5} ['history', 'hits', 'rates', 'best'] "
        "tensor([7., 7., 7.]) [9.0, 9.0, 9.0]"
    )
