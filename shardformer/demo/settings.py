"""What the demo can be asked for. The command's options and their help are made of these fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shardformer.errors import ConfigError, nearest

FAMILIES = ("bert", "gpt2", "llama", "t5")
HEAD_DIM = 32


MOST = {"layers": 256, "hidden": 8192, "batch": 2**14, "sequence": 2**16, "steps": 10**7}


@dataclass(frozen=True)
class Settings:
    """The sizes of the demo. None is the default, which an option that excludes it does not collide with.

    Raises ConfigError for a size that cannot be.
    """

    family: Annotated[str | None, "What to build: bert, gpt2 (the default), llama or t5."] = None
    model: Annotated[str | None, "Instead, a folder of a HuggingFace model, a config.json, or a name on the hub."] = (
        None
    )
    data: Annotated[str | None, "A text file to train on, by default the English text that Python carries."] = None
    tensor: Annotated[
        int | None, "Over how many processes each layer of the second run is split: by default 2, and with --pipe 1."
    ] = None
    pipe: Annotated[int | None, "Into how many stages its layers are cut, each on processes of its own."] = None
    micro_batches: Annotated[int | None, "Parts of a batch in a pipeline, by default two a stage."] = None
    steps: Annotated[int, "Training steps."] = 120
    batch: Annotated[int, "Samples in a step."] = 8
    sequence: Annotated[int, "Tokens in a sample."] = 128
    layers: Annotated[int | None, "Layers of the model, by default 4."] = None
    hidden: Annotated[int | None, f"Its hidden size, by default 256: a multiple of {HEAD_DIM}."] = None
    sequence_parallel: Annotated[bool, "Split the sequence as well, between the blocks."] = False

    def __post_init__(self) -> None:
        least = {
            "tensor": 2 if self.pipe is None else 1, "pipe": 2, "micro_batches": 1, "steps": 1, "batch": 1,
            "sequence": 8, "layers": 1, "hidden": HEAD_DIM,
        }  # fmt: skip
        for name, smallest in least.items():
            size = getattr(self, name)
            if size is not None and size < smallest:
                raise ConfigError(
                    f"{name}={size}",
                    rule=f"The demo takes {name} from {smallest}",
                    remedy=f"Use --{name.replace('_', '-')} {smallest} or more",
                )
        for name, largest in MOST.items():
            size = getattr(self, name)
            if size is not None and size > largest:
                raise ConfigError(
                    f"{name}={size}",
                    rule=f"The demo is a small run, of {name} up to {largest}",
                    remedy=f"Use --{name} {largest} or less",
                )
        if self.micro_batches is not None and self.pipe is None:
            raise ConfigError(
                f"--micro-batches {self.micro_batches} without --pipe",
                rule="Micro-batches are what a batch is cut into for the stages of a pipeline",
                remedy="Add --pipe 2, or leave it out",
            )
        if self.num_parts > self.batch:
            raise ConfigError(
                f"micro_batches={self.num_parts} and batch={self.batch}",
                rule="Every micro-batch has one sample or more",
                remedy=f"Use --batch {self.num_parts} or more, or --micro-batches {self.batch} or less",
            )
        if self.hidden is not None and self.hidden % HEAD_DIM:
            below = self.hidden // HEAD_DIM * HEAD_DIM
            raise ConfigError(
                f"hidden={self.hidden}",
                rule=f"The demo's attention heads are {HEAD_DIM} wide, so the hidden size is a multiple of {HEAD_DIM}",
                remedy=f"Use --hidden {below} or --hidden {below + HEAD_DIM}",
            )
        if self.family is not None and self.family not in FAMILIES:
            raise ConfigError(
                f"family={self.family!r}",
                rule=f"The families are {', '.join(FAMILIES)}",
                remedy=nearest(self.family, FAMILIES),
            )
        taken = [name for name in ("family", "layers", "hidden") if getattr(self, name) is not None]
        if self.model is not None and taken:
            small = " ".join(f"--{name} {getattr(self, name)}" for name in taken)
            raise ConfigError(
                f"--model {self.model} beside {small}",
                rule="A model that is given has its own sizes; --family, --layers and --hidden make a small random one",
                remedy=f"Keep --model {self.model} alone to train that model, or {small} alone for a small random one",
            )

    @property
    def tensor_size(self) -> int:
        """Processes that hold parts of one layer."""
        return self.tensor or (2 if self.pipe is None else 1)

    @property
    def num_processes(self) -> int:
        """Of the second run."""
        return self.tensor_size * (self.pipe or 1)

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches a batch is cut; 1 without a pipeline."""
        return 1 if self.pipe is None else self.micro_batches or min(2 * self.pipe, max(self.batch, 1))
