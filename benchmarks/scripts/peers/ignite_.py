import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy
from torch.nn import functional as F
from work import BATCH, EPOCHS, Net, notes, test_set, train_set


def main(local_rank):
    torch.manual_seed(0)
    train = idist.auto_dataloader(train_set, batch_size=BATCH, shuffle=True)
    test = idist.auto_dataloader(test_set, batch_size=500, shuffle=False)
    model = idist.auto_model(Net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    def step(engine, batch):
        x, y = batch
        model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.step()

    trainer = Engine(step)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine):
        train.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        accuracy = evaluator.run(test).metrics["accuracy"]
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: {accuracy:.2%}")

    trainer.run(train, max_epochs=EPOCHS)
    if idist.get_rank() == 0:
        notes.end(evaluator.state.metrics["accuracy"], model.module)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(main)
