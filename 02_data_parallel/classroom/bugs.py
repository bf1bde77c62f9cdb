"""Data parallelism in threads with one mistake each, of the kind people really make. Can you find it?

    python classroom/bugs.py                 the names
    python classroom/bugs.py NAME            the code with the mistake in it: by_hand.py, but for one place
    python classroom/bugs.py NAME --answer   the place, and the number that refuses it

Every one is refused by the comparison with training on one process (common/lab/equality.py).
"""

from functools import partial

from common.lab.bugs import Bug, Bugs

bug = partial(Bug, "ThreadedDataParallelByHand", ranks=1)

BUGS = Bugs(
    __file__,
    {
        "first_replica_only": bug(
            inside="replicate",
            right="tensor.to(device, copy=True) if number",
            wrong="tensor.detach().to(device, copy=True) if number",
            refused_by="grad_norm",
            why="The copies are cut off from the parameters that they were copied from. Only the first replica's "
            "gradient comes back: all devices compute, and one of them counts.",
        ),
        "plain_deepcopy": bug(
            inside="replicate",
            right="copy.deepcopy(model, memo)",
            wrong="copy.deepcopy(model)",
            refused_by="grad_norm",
            why="The replicas are models of their own. Autograd leaves the gradients with them, and they are thrown "
            "away with them.",
        ),
        "kept_replicas": bug(
            inside="data_parallel",
            right="replicas = replicate(model, devices[: len(slices)])",
            wrong="replicas = vars(data_parallel).setdefault(str(id(model)), replicate(model, devices[: len(slices)]))",
            refused_by="loss",
            why="Copying the model in every step is a waste, so the replicas are kept. After the optimizer's first "
            "step all but the first, which shares the model's memory, compute with old weights.",
        ),
        "strided_slices": bug(
            inside="scatter",
            right="inputs.chunk(len(devices))",
            wrong="[inputs[place :: len(devices)] for place in range(len(devices))]",
            refused_by="loss",
            why="Examples are dealt out like cards, and gathered device by device: the outputs come back in another "
            "order than the targets. The shapes are right.",
        ),
        "scattered_time": bug(
            inside="scatter",
            right="inputs.chunk(len(devices))",
            wrong="inputs.chunk(len(devices), dim=1)",
            refused_by="loss",
            why="Sequences are cut, not the batch, as happens with inputs of [time, batch] and the default dim=0. "
            "Flattened, the outputs are as many as the targets, so nothing complains.",
        ),
        "gathered_along_time": bug(
            inside="gather",
            right="torch.cat([output.to(device) for output in outputs])",
            wrong="torch.cat([output.to(device) for output in outputs], dim=1)",
            refused_by="loss",
            why="Outputs are joined along time. Flattened, they are as many as the targets, in another order.",
        ),
        "same_slice": bug(
            inside="parallel_apply",
            right="zip(pools, replicas, slices, streams, strict=False)",
            wrong="zip(pools, replicas, slices[:1] * len(replicas), streams, strict=False)",
            refused_by="loss",
            why="Every replica computes the first slice.",
        ),
        "divided_by_devices": bug(
            inside="step",
            right="len(micro_batches)\n            self",
            wrong="len(micro_batches) / len(self.devices)\n            self",
            refused_by="loss",
            why="The loss is divided by the number of devices, 'because the gradients are summed'. They are the "
            "gradients of one mean over the whole batch, and their sum is what one process has.",
        ),
        "not_divided": bug(
            inside="step",
            right=" / len(micro_batches)\n            self",
            wrong="\n            self",
            refused_by="loss",
            why="The loss is not divided by the number of micro-batches: with accumulation M, gradients are M times "
            "too large.",
        ),
        "impatient": bug(
            inside="step",
            right="loss += part.detach()",
            wrong="loss += part.detach()\n            self.optimizer.step()",
            refused_by="loss",
            why="The optimizer steps after every micro-batch, by a gradient that is not complete.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
