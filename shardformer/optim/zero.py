"""ZeRO: each rank keeps a part of the optimizer's state, of the masters of 16-bit parameters, and of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from shardformer.mesh.context import ParallelContext
from shardformer.optim.checks import as_list, checked
from shardformer.optim.optimizer import ZeroOptimizer
from shardformer.optim.settings import Layout, Offload, Precision, Rules, Sending, Settings
from shardformer.optim.table import table_of


def zero(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    stage: int = 1,
    precision: str | Precision = "fp32",
    offload: str | Offload | None = None,
    max_grad_norm: float | None = None,
    on_nonfinite: str = "raise",
    keep_frozen: bool = True,
    reshard_after_forward: bool | int | str | None = None,
    bucket_bytes: int | None = None,
    overlap: bool = True,
    context: ParallelContext | None = None,
) -> ZeroOptimizer:
    """Cuts what optimizers keep over the ranks that agree on the gradients, mostly those of the data axis.

    >>> model = shardformer.shard_model(model, context=context)                                   # doctest: +SKIP
    >>> optimizer = shardformer.zero(torch.optim.AdamW(model.parameters()), model, stage=2)       # doctest: +SKIP

    Args:
        optimizer: one of torch's or any other, or several, made of the parameters of ``model``. One that changes each
            number by itself gets parts of parameters; one that looks at whole matrices (Muon, Adafactor) gets whole
            ones, each on one rank. Which it is, is tried.
        model: what ``shard_model`` returned, or any other module, which then is trained over the data axis alone.
        stage: 0 cuts nothing: every rank keeps all. 1 cuts the optimizer's state; 2 the gradients too, which then are
            agreed on in every backward; 3 the parameters too, which are gathered layer by layer when they are used.
        precision: "fp32" leaves the parameters as they are; "bf16" and "fp16" keep them in 16 bits, and a master of
            each rank's pieces in fp32; a ``Precision`` says more. In fp16 call ``optimizer.backward(loss)``, which
            scales the loss.
        offload: "cpu" keeps masters, the optimizer's state and gradients on the host, and updates there; gradients come
            down under the backward. "nvme:DIR" keeps masters and state in files. An ``Offload`` says more.
        max_grad_norm: to which ``step`` clips the norm of all gradients; None leaves them as they are.
        on_nonfinite: what ``step`` does when a gradient is NaN or infinite: "raise" InputError on all ranks, before
            anything is changed; "skip" the step; "ignore". In fp16 the step is skipped and the scale made smaller.
        keep_frozen: whether stage 3 leaves parameters whole that do not train.
        reshard_after_forward: whether stage 3 drops a layer behind its use and gathers it again for the backward; False
            gathers once a step. None: True, but not in a pipeline, of which each micro-batch would gather. A number of
            bytes: that much of the last layers stays for the backward; "free": what the first step left free of a GPU.
        bucket_bytes: of gradients that are sent together; None: 25 MB, or what the sharded model was told.
        overlap: whether gradients, and the layers of stage 3, travel while others are computed.
        context: the grid of a model that was not sharded; None: all processes are data ranks.

    Returns an optimizer to be used in the place of those given. Raises ConfigError for what does not fit. Communicates
    the weights of the first data rank to the others, where the model was not sharded.
    """
    table = table_of(model, context)

    def given() -> tuple[list[Optimizer], Settings]:
        optimizers = as_list(optimizer)
        rules, sending = Rules(max_grad_norm, on_nonfinite), Sending(bucket_bytes, overlap)
        layout = Layout(keep_frozen, reshard_after_forward)
        places = Offload.of(offload, optimizers)
        return optimizers, Settings(stage, Precision.of(precision), rules, sending, layout, places)

    return ZeroOptimizer(model, table, *checked(given, model, table))
