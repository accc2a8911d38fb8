"""ZeRO: each rank keeps a part of the optimizer's state, of the masters of 16-bit parameters, and of the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.collectives import all_reduce
from shardformer.errors import ConfigError
from shardformer.layout.state import Entry, ShardedState
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.optim.checks import check_memory, check_optimizers
from shardformer.optim.probe import check_elementwise
from shardformer.optim.shards import Piece, Shard
from shardformer.optim.stage3.layout import Layout, lay_out_units
from shardformer.optim.stage3.walk import Walk
from shardformer.optim.table import table_of
from shardformer.reduce.bucket import Bucket, Gradient
from shardformer.reduce.buckets import BUCKET_BYTES, GradientReducer

STAGES = (1, 2, 3)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


class _ZeroGrad:
    """``model.zero_grad()``: throws away what the optimizer keeps too. Of a copied model it is the usual one."""

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer | None) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    def __call__(self, set_to_none: bool = True) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer.zero_grad()
        elif (model := self._model()) is not None:
            nn.Module.zero_grad(model, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ZeroGrad:
        return _ZeroGrad(memo[id(self._model())], None)


class ZeroOptimizer(Optimizer):
    """What ``shardformer.zero`` returns. It is used as any optimizer of torch is; its parameters are pieces of yours.

    Attributes:
        grad_norm: the norm of the last step's gradients before they were clipped; None where it was not taken.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module,
        table: ShardedState,
        stage: int,
        dtype: torch.dtype | None,
        max_grad_norm: float | None,
        layout: Layout,
    ) -> None:
        self._inner, self._model, self._table, self._stage = list(optimizers), model, table, stage
        self._max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self._walk: Walk | None = None
        self._shards = self._lay_out_units(dtype, layout) if stage == 3 else self._lay_out(dtype)
        self._convert(dtype)
        self._by_bucket = {id(shard.gradients): shard for shard in self._shards}
        self._replace_parameters()
        super().__init__([group for optimizer in self._inner for group in optimizer.param_groups], {})
        self._is_laid_out = True
        table.gradients = self
        model.__dict__["zero_grad"] = _ZeroGrad(model, self)

    def _lay_out(self, dtype: torch.dtype | None) -> list[Shard]:
        """The shards of all buckets. Parameters that no ranks agree on get buckets of their own, of one rank."""
        table = self._table
        reducers = [reducer for reducer in table.reducers if isinstance(reducer, GradientReducer)]
        held = {id(gradient.param) for reducer in reducers for gradient in reducer.gradients}
        if alone := [Gradient(e, Axis("none"), table.coords) for e in table.entries if id(e.param) not in held]:
            size: Any = table.request.extra.get("bucket_bytes", BUCKET_BYTES)
            reducers.append(GradientReducer(alone, size))
            table.reducers.append(reducers[-1])
        return [Shard(bucket, dtype) for reducer in reducers for bucket in reducer.hand_over(self._receive)]

    def _lay_out_units(self, dtype: torch.dtype | None, layout: Layout) -> list[Shard]:
        """The shards of all units of stage 3, and the buckets of what several stages hold together."""
        self._walk, shards = lay_out_units(self._model, self._table, dtype, self._receive, layout)
        reducers = [reducer for reducer in self._table.reducers if isinstance(reducer, GradientReducer)]
        return shards + [Shard(bucket, dtype) for r in reducers for bucket in r.hand_over(self._receive)]

    def _convert(self, dtype: torch.dtype | None) -> None:
        """Only when the masters are made, of what the parameters were."""
        for entry in self._table.entries:
            if dtype is not None and entry.param.is_floating_point() and entry.param.dtype != dtype:
                entry.param.data = entry.param.data.to(dtype)

    def _receive(self, bucket: Bucket, part: Tensor, had: Tensor) -> None:
        self._by_bucket[id(bucket.gradients)].receive(part, had)

    def _replace_parameters(self) -> None:
        """The optimizers get this rank's pieces in the place of the parameters, and of their state what goes with them.

        Communicates one all-reduce for each tensor of state of which several ranks hold slices.
        """
        pieces: dict[int, list[Piece]] = {}
        for shard in self._shards:
            for number, gradient in enumerate(shard.gradients):
                param: Any = gradient.param
                found = [piece for piece in shard.pieces if piece.number == number]
                pieces.setdefault(id(param), []).extend(found)
                for optimizer in self._inner:
                    if state := optimizer.state.pop(param, None):
                        cut = shard.cut(number, state)
                        optimizer.state.update({piece.value: cut for piece in found})
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["params"] = [piece.value for p in group["params"] for piece in pieces.get(id(p), ())]

    # --- one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips, updates this rank's pieces, and brings the new parameters together on all ranks.

        Communicates one all-gather of the parameters that got a gradient; to clip, one number over each axis.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._agree_on_the_rest()
        if self._max_grad_norm is not None:
            self.clip_grad_norm_(self._max_grad_norm)
        for shard in self._shards:
            shard.give_gradients()
        for optimizer in self._inner:
            optimizer.step()
        self._hand_out([shard for shard in self._shards if any(shard.had)])
        for shard in self._shards:
            shard.forget()
        return loss

    def _hand_out(self, shards: Sequence[Shard]) -> None:
        """The model's parameters get what the optimizers made of the pieces; under stage 3 in the next forward."""
        if self._walk is not None:
            self._walk.put_away()
        for shard in shards:
            shard.store()
        under_way = [(shard, shard.start_gather()) for shard in shards if shard.whole is not None]
        for shard, values in under_way:
            values.wait()
            shard.write()

    def _agree_on_the_rest(self) -> None:
        """On what backwards left that were all in ``no_sync``."""
        for reducer in self._table.reducers:
            if reducer.was_paused:
                reducer.start()
                reducer.finish()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns the norm before, the same on all ranks. Communicates one all-reduce of one number over each axis.
        """
        if norm_type != 2.0:
            raise ConfigError(
                f"norm_type={norm_type} beside zero",
                rule="What ZeRO clips by is the Euclidean norm",
                remedy="Leave norm_type out",
            )
        self._agree_on_the_rest()
        self.grad_norm = norm = self._norm()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self._shards:
            if shard.sum is not None:
                shard.sum.mul_(scale.to(shard.sum))
        return norm

    def _norm(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._table.context.device)
        for shard in self._shards:
            for piece in shard.pieces:
                if shard.sum is not None and shard.had[piece.number] and self._counts(piece.gradient.entry):
                    total += torch.linalg.vector_norm(shard.sum[piece.at]).to(total) ** 2
        for axis in self._table.context.axes.values():
            total = all_reduce(total, axis, purpose="norm")
        is_wide = any(entry.param.dtype == torch.float64 for entry in self._table.entries)
        return total.sqrt() if is_wide else total.sqrt().float()

    def _counts(self, entry: Entry) -> bool:
        """Whether this rank counts what it has of a parameter: of what ranks hold alike, the first one does."""
        reduction = entry.reduction
        own = {*reduction.sum_over, *reduction.norm_over, *(["pipe"] if reduction.stages else [])}
        return all(rank == 0 for name, rank in self._table.context.coords.items() if name not in own)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throws away all gradients, those of backwards in ``no_sync`` too."""
        for shard in self._shards:
            shard.forget()
        for p in self._model.parameters():
            p.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last backward of a step. Stage 2 keeps no whole gradient, so that it agrees each time."""
        with self._table.paused() if self._stage < 2 else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``."""
        loss.backward()

    def full_gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter as the next step will use it, in the shape that the parameter has on this rank.

        None where it has none. All ranks call it. Communicates one all-gather of a bucket.
        """
        self._agree_on_the_rest()
        for shard in self._shards:
            for number, gradient in enumerate(shard.gradients):
                if gradient.entry.name == name:
                    return shard.gather_gradient(number)
        raise ConfigError(
            f"There is no gradient of {name!r}",
            rule="Asked for are parameters that train, by their names in the model",
            remedy="See [name for name, p in model.named_parameters() if p.requires_grad]",
        )

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: the optimizers' states of its pieces, and their masters. Each rank saves its own."""
        context = self._table.context
        return {
            "place": {"sizes": context.sizes, "coords": context.coords},
            "optimizers": [optimizer.state_dict() for optimizer in self._inner],
            "masters": [piece.value.detach().clone() for shard in self._shards for piece in shard.pieces],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` of the same rank of an equal grid gave. Raises ConfigError for another one's."""
        context = self._table.context
        pieces = [piece for shard in self._shards for piece in shard.pieces]
        place = {"sizes": context.sizes, "coords": context.coords}
        shapes = [tuple(master.shape) for master in state_dict["masters"]]
        if state_dict["place"] != place or shapes != [tuple(piece.value.shape) for piece in pieces]:
            raise ConfigError(
                f"This optimizer's state was saved by the rank {state_dict['place']}, and this is {place}",
                rule="The pieces of a rank fit the same rank of an equal grid, with the same model and buckets",
                remedy="Load the file that this rank saved, with as many processes as then",
            )
        with torch.no_grad():
            for piece, master in zip(pieces, state_dict["masters"], strict=True):
                piece.value.copy_(master)
            self._hand_out(self._shards)
        for optimizer, state in zip(self._inner, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the pieces of the parameters are laid out once."""
        if getattr(self, "_is_laid_out", False):
            raise ConfigError(
                "add_param_group was called on the optimizer that zero returned",
                rule="The pieces of the parameters are laid out once",
                remedy="Add the group to your own optimizer, then call zero",
            )
        super().add_param_group(param_group)


def zero(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    stage: int = 1,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    keep_frozen: bool = True,
    reshard_after_forward: bool | None = None,
    context: ParallelContext | None = None,
) -> ZeroOptimizer:
    """Cuts what optimizers keep over the ranks that agree on the gradients, mostly those of the data axis.

    >>> model = shardformer.shard_model(model, context=context)                                   # doctest: +SKIP
    >>> optimizer = shardformer.zero(torch.optim.AdamW(model.parameters()), model, stage=2)       # doctest: +SKIP

    Args:
        optimizer: one of torch's or any other that looks at one number at a time, or several; made of the parameters
            of ``model``, and new.
        model: what ``shard_model`` returned, or any other module, which then is trained over the data axis alone.
        stage: 1 cuts the optimizer's state; 2 the gradients too, which then are agreed on in every backward; 3 the
            parameters too, which are gathered layer by layer when they are used.
        precision: "fp32" leaves the parameters as they are; "bf16" keeps them in 16 bits, and a master of each rank's
            pieces in fp32.
        max_grad_norm: to which ``step`` clips the norm of all gradients; None leaves them as they are.
        keep_frozen: whether stage 3 leaves parameters whole that do not train.
        reshard_after_forward: whether stage 3 drops a layer behind its use and gathers it again for the backward; False
            gathers once a step. None: True, but not in a pipeline, of which each micro-batch would gather.
        context: the grid of a model that was not sharded; None: all processes are data ranks.

    Returns an optimizer to be used in the place of those given. Raises ConfigError for what does not fit. Communicates
    the weights of the first data rank to the others, where the model was not sharded.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if stage not in STAGES:
        raise ConfigError(
            f"stage={stage!r}", rule=f"The stages are {', '.join(map(str, STAGES))}", remedy="Write stage=1, 2 or 3"
        )
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision={precision!r}",
            rule=f"The precisions are {', '.join(PRECISIONS)}",
            remedy="Write precision='bf16', or leave it out",
        )
    table = table_of(model, context)
    check_optimizers(optimizers, table)
    check_memory(table)
    for each in optimizers:
        check_elementwise(each)
    layout = Layout(keep_frozen, reshard_after_forward)
    return ZeroOptimizer(optimizers, model, table, stage, PRECISIONS[precision], max_grad_norm, layout)
