"""What to write instead, for each difference between runs: the second half of the sentences in causes.py."""

STEPS = "use steps, whose microbatches are the same at any number of processes"

# The records show the difference.
SHOWN = {
    "foreign": "use samestep.loader, so that the ranks share each batch",
    "samples": "give samestep.loader the same dataset, sampler, seed and batch_size, which is that of the whole step, "
    "and each step as many batches, at any number of processes",
    "mode": "call model.train() on every rank before the epoch",
    "rate": "every step has the whole batch, so do not scale it by the number of processes",
    "schedule": "its schedule uses a length or count that depends on the number of processes",
    "rate of a rank": "build the optimizer and its schedule, and step both, in the same way on every rank",
    "clip": "the gradient is that of the whole batch, so clip it by the same number at any number of processes",
    "no steps": "each rank trains with its own share of every batch; run the training loop on all ranks",
    "uneven": "each rank has a share of every step; decide whether to step, and when to stop, from a value that is "
    "equal on all ranks, such as samestep.mean(loss)",
    "own": "make it a parameter of the model",
}
AGAINST_THE_UNTOUCHED = {
    "samples": "give samestep.loader what the script's DataLoader had: dataset, batch_size, shuffle, sampler and "
    "drop_last, and no seed; a sampler's set_epoch is called for each pass; let a sample or a stream that draws at "
    "random seed a generator of its own",
    "rate": "give the optimizer and its schedule the numbers that the untouched script gives them",
    "first weights": "set the same seed, and draw nothing else before the model is built",
    "steps": "train for as many epochs of as many batches, and stop by the same values",
    "loss": "the same samples and weights give another loss: compute it, and the model's output, as the untouched "
    "script does",
    "grad": "the same samples, weights and loss give other gradients: clip, scale and accumulate them as the untouched "
    "script does",
    "weights": "the same gradients give other weights: take the optimizer of the untouched script, and change weights "
    "where it does",
    "buffer": "the same samples and weights give other buffers: change them where the untouched script does",
}
# The rank, or the number of ranks, causes the difference.
OF_WORLD = SHOWN | {
    "failed": "the rank or the number of ranks decides what the script does",
    "steps": "take the number of steps from len() of samestep.loader, without the number of processes",
    "first weights": "build the same model from the same seed on every rank, at any number of processes, before "
    "code that differs between ranks draws random numbers",
    "apart": "code that only some ranks run changes it; run it on every rank",
    "inputs": "the same samples have different inputs; seed alike on every rank where data are made, and augment each "
    "sample in the dataset from the sample alone, not from the rank",
    "numbers": "what is trained depends on the rank or the number of ranks; leave them out: every step has the whole "
    "batch, and its gradient is averaged by samestep",
}
# A value computed from a rank's share causes the difference.
DECIDED = (
    "it is decided by a value of each rank's own share, such as its loss, accuracy or length; decide by a value that "
    "is equal on all ranks: samestep.mean(loss), samestep.sum(correct), samestep.sum(len(x))"
)
DRAWN_APART = (
    "draw it for the whole batch in the collate_fn, as docs/losses.md shows for mixup; without that draw verify can "
    "tell what else differs"
)
OF_THE_SHARE = {
    "failed": "it fails where a rank has its share of a batch alone: fewer samples than batch_size, or padding to "
    "another length; take sizes from the tensors at hand",
    "loop": "the loop changes the inputs by what each rank draws, by values of its share (its mean, other samples) or "
    "by the rank; draw for each sample in the dataset, use values of the whole data set, or of the whole batch by "
    f"samestep.mean or gather, or {STEPS}, with replicate(exact=True)",
    "given": "the same samples are other numbers: the dataset or its collate_fn draws from a generator of its own, "
    "counts its calls, or computes from the other samples of a batch; draw from torch's, Python's or NumPy's own "
    "stream, which is seeded for each sample, and compute on each sample alone",
    "outputs": "the model computes over all samples of its input together (a mean, a normalization, a maximum), or "
    "with what was made of earlier shares (a mask, a temperature), and each rank has only its share; compute on each "
    f"sample, or use samestep.gather, sum or mean for what is made of several, or {STEPS}",
    "numbers": "the loss is not a mean over samples: it is computed from all samples of a rank's share together "
    "(pairs, statistics, a maximum, a count, the hardest terms), or from what earlier shares left (a running mean, a "
    f"queue); compute it from samestep.gather(model(x)), or from samestep.sum and mean, or {STEPS}",
    "numbers later": "the loss is computed with what each rank made of its earlier shares (a running mean, a queue, "
    "counts, a number that its own loss or accuracy gave), or of all samples of its share together (pairs, a maximum, "
    "the hardest terms, a count); take samestep.sum, mean or gather of what is made of several samples",
    "gradients": "the loss is the same and its gradient is not: each rank makes (autograd.grad, torch.func), clips, "
    "scales or divides its own (by the number of its samples), or they are averaged by hand with equal weights for "
    "unequal shares, or the loss takes other ranks' values without their gradient, as dist.all_gather does, or a hook "
    "or an autograd.Function takes a mean of gradients over the samples; leave them to loss.backward() and "
    "samestep.replicate, or take samestep.mean of what torch.func gives, and use samestep.gather",
    "weights": "the same gradients give other weights: the loop changes them beside the optimizer, by a number of each "
    "rank's share (its length, its loss); take samestep.sum(len(x)) or samestep.mean(loss) there",
    "buffer": "take samestep.mean(...) or gather(...) there of what it is made of",
}
# A specific experiment shows the cause.
UNSTABLE = {
    "seeds": "no seed is set: two runs {at} differ too; call torch.manual_seed, and seed NumPy's and Python's random "
    "numbers where they are used, before data and model are made",
    "clock": "the time or the process's number decides what is trained ({lines}); count steps or samples "
    "instead, and seed with a number",
    "hashes": "Python's hash() of strings, and so the order of a set of them, is another in each process: two runs "
    "{at} differ too; seed with a number, and sort sets, as in sorted(set(labels))",
}
STILL_UNSTABLE = (
    "two runs {} differ, also with seeds set and the clock and hashes fixed; make them equal first: look for data from "
    "elsewhere, threads, and nondeterministic kernels"
)
MADE_BY_A_RANK = (
    "at one process the file is there: if the script makes it, a rank came before it was made; make it inside "
    "`with samestep.first():`, which the other ranks wait for"
)
SUM = (
    "the loss is a sum over each rank's samples, but gradients are averaged over the ranks; write replicate(model, "
    'loss="sum"), or divide the loss by len(y)'
)
COUNT = (
    "the loss is divided by a count in each rank's share ({}); compute it from samestep.gather(...) of what it is "
    "given, or see docs/losses.md"
)
NO_SYNC = (
    "a step's last backward, or what reads or changes gradients, is inside no_sync ({}), where each rank has its own; "
    "let the last backward of each step be outside of it, and clip or scale gradients after that"
)
CARELESS = (
    "an evaluation in training mode ({}) changes BatchNorm statistics; call model.eval() before it and model.train() "
    "after it"
)
GRADIENTS_SCALED = (
    "gradients are {:.3g} times those {} and the loss is the same; samestep averages gradients over the ranks: do not "
    "divide, multiply or all-reduce them"
)
LOSS_SCALED = (
    "the loss is {:.3g} times that {}: one of its factors depends on the number of processes (world.size, the length "
    "of a share, samestep.sum of the ranks' means); leave that factor out"
)
OWN_SEED = (
    "each rank has a seed of its own for what it draws; with --same too its draws are then not those of the serial "
    "script, unless all ranks have the same seed"
)
OWN_DATA = (
    "each rank draws training data of its own, from a seed of its own, so a step has other samples, and more of them, "
    "than the serial script's; seed alike on every rank, so that all have the same data, and take the batches from "
    "samestep.loader"
)
OWN_DRAWS = (
    "each rank changes the weights by random numbers of its own; initialise the model before the first batch, and draw "
    "later changes from a torch.Generator with the same seed on every rank"
)
AUGMENTED = (
    "what a sample draws at random is a function of (seed, epoch, sample) with samestep.loader, and not what the "
    "untouched script draws"
)
DRAWN = (
    "{} at this point, so that later random numbers are others; draw the same as the untouched script, and what is "
    "added from a generator of its own"
)
EXACT = (
    "the same bits need steps and replicate(exact=True), no values of a rank's share, the rank or the time, and no "
    "nondeterministic kernels; add floats in the order of microbatches, from samestep.gather"
)
