"""Two linear layers, whole in one process or cut over several: the smallest case of tensor parallelism.

    python mlp.py
    torchrun --nproc_per_node 2 mlp.py --tensor-parallel

Both print the same losses.
"""

# B batch, H hidden; lower case: the local shard (h = H / tensor)

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from measuring import add_arguments, profiled, report, start
from torch import Tensor, nn
from torch.profiler import record_function

from shardformer.comm.collectives import gather_full_tensor
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row

SEED, BATCH, HIDDEN, NUM_STEPS = 1234, 8, 128, 2


class MLP(nn.Module):
    """(B, H) -> (B, H), of two linear layers of the kinds given.

    How to cut it? Let rank r hold some of the features of fc1's output: rows A_r of fc1's weight, as torch's y = x W^T
    keeps an output feature in a row; the field speaks of columns. ReLU needs one number at a time, so it can be applied
    before anybody has talked to anybody. fc2 multiplies each of these features with one column of its weight, so rank r
    needs the columns B_r of its own features only, and one sum at the end is all:

        fc2(relu(fc1(x))) = sum over r of  relu(x A_r^T) B_r^T          A = [A_0; A_1],  B = [B_0, B_1]

    fc1 is column-parallel, fc2 row-parallel. The other way round ReLU would stand behind partial sums, and as
    relu(a + b) is not relu(a) + relu(b) they would have to be summed before it too.

        x --> f --> A_r --> relu --> B_r --> g --> y

    g sums the partial products: forward all-reduce, backward identity. f is its mirror image: forward identity, as
    every rank has x; backward all-reduce, as rank r finds only that part of x's gradient which flows through its own
    features. Linear1D_Row ends with g, Linear1D_Col begins with f. Here f is idle: x is data and wants no gradient.
    """

    def __init__(self, hidden: int, column: Callable[..., nn.Module], row: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.fc1 = column(hidden, hidden, bias=False)
        self.fc2 = row(hidden, hidden, bias=False)

    def forward(self, x_BH: Tensor) -> Tensor:
        y_Bh = torch.relu(self.fc1(x_BH))
        return self.fc2(y_Bh)


def build(args: argparse.Namespace, context: ParallelContext) -> MLP:
    # The parallel layers draw the numbers of the whole layer and keep their part of them, so after the same seed they
    # hold slices of what the plain ones hold.
    torch.manual_seed(SEED)
    if not args.tensor_parallel:
        return MLP(HIDDEN, nn.Linear, nn.Linear)
    axis = context.tensor
    return MLP(HIDDEN, partial(Linear1D_Col, process_group=axis), partial(Linear1D_Row, process_group=axis))


def train(model: MLP, x_BH: Tensor, context: ParallelContext) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    spec = get_shard_specs(model)["fc1.weight"]
    for step in range(1, NUM_STEPS + 1):
        with record_function(f"step {step}"):
            loss = model(x_BH).sum()
            loss.backward()
            # Gathered only to be looked at: Adam treats each number by itself, so every rank updates its own.
            gradient_HH = gather_full_tensor(model.fc1.weight.grad, spec, context.axis)
            optimizer.step()
            optimizer.zero_grad()
        if context.tensor.rank == 0:
            corner = ", ".join(f"{value:.4f}" for value in gradient_HH[0, :3])
            print(f"iter {step}  loss {loss.item():.6f}  gradient of fc1 [[{corner}, ...", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="An MLP, whole or tensor-parallel.")
    add_arguments(parser)
    args = parser.parse_args()
    context = start(args)
    with profiled("mlp", f"hidden {HIDDEN}, batch {BATCH}", args, context), CollectiveRecorder(context) as recorder:
        with record_function("build"):
            model = build(args, context).to(context.device)
            torch.manual_seed(SEED)
            x_BH = torch.randn(BATCH, HIDDEN).to(context.device)
        train(model, x_BH, context)
    report(model, recorder, NUM_STEPS, context)


if __name__ == "__main__":
    main()
