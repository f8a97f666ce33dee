"""Trains a character-level language model."""

import torch
from model import GPT
from torch.utils.data import Dataset
from trainer import Trainer
from utils_config import CfgNode as CN
from utils_config import set_seed


class CharDataset(Dataset):
    def __init__(self, block_size):
        self.data = torch.randint(0, 11, (60,), generator=torch.Generator().manual_seed(1))
        self.block_size = block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        chunk = self.data[idx : idx + self.block_size + 1]
        return chunk[:-1], chunk[1:]


if __name__ == "__main__":
    config = CN(seed=3407, block_size=6, trainer=Trainer.get_default_config())
    set_seed(config.seed)
    train_dataset = CharDataset(config.block_size)
    model = GPT(11, config.block_size)
    config.trainer.max_iters = 14
    trainer = Trainer(config.trainer, model, train_dataset)

    # iteration callback
    def batch_end_callback(trainer):
        if trainer.iter_num % 4 == 0:
            print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")

        if trainer.iter_num % 10 == 0:
            # evaluate both the train and test score
            model.eval()
            with torch.no_grad():
                # sample from the model...
                x = train_dataset[0][0][None, :3]
                y = model.generate(x, 3)
                print(y.tolist())
            print("saving model")
            torch.save(model.state_dict(), "model.pt")
            # revert model to training mode
            model.train()

    trainer.set_callback("on_batch_end", batch_end_callback)

    # run the optimization
    trainer.run()
