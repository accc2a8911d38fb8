"""Loading only the local shards of saved weights matches loading with transformers and sharding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import materialize
from shardformer.shard_model_api import shard_model
from shardformer.sharding.describe import describe_sharding
from shardformer.verify.small_models import SMALL_CONFIGS, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.from_pretrained import from_pretrained
from tests.lazy.families import FAMILIES, assert_same, build
from tests.pairwise import in_turn

BERT = SmallModelFactory("bert")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def save(model: Any, folder: Path, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def loaded_by_both(kind: Any, folder: Path, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Load with this package and materialize, and load with transformers; compare the random states."""
    torch.manual_seed(5)
    plain = kind.from_pretrained(folder, **options)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    ours = from_pretrained(kind, folder, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.is_meta for p in ours.parameters())
    assert ours.training is plain.training is False
    return ours, plain


@pytest.mark.reduced(one_in=4, at_most=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_loads_as_with_transformers(family: str, tmp_path: Path) -> None:
    """Load from several files, including mixtral's experts, which are saved under other names and shapes."""
    model = build(family)
    save(model, tmp_path, shard_size="60KB")
    ours, plain = loaded_by_both(type(model), tmp_path)
    assert_same(materialize(ours), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "auto", torch.float64], ids=str)
def test_the_requested_dtype_is_used(dtype: Any, tmp_path: Path) -> None:
    save(build("llama", torch.float16), tmp_path)
    ours, plain = loaded_by_both(transformers.LlamaForCausalLM, tmp_path, dtype=dtype)
    assert_same(materialize(ours), plain)


@pytest.mark.parametrize(
    ("saved", "kind", "head", "other"),
    [
        ("BertModel", "BertForMaskedLM", "cls.predictions.bias", "pooler.dense.bias"),  # saved without "bert."
        ("BertForMaskedLM", "BertModel", "pooler.dense.bias", "cls.predictions.bias"),
        ("BertForMaskedLM", "BertForSequenceClassification", "classifier.bias", "cls.predictions.bias"),
    ],
)
def test_a_new_head_matches_transformers(saved: str, kind: str, head: str, other: str, tmp_path: Path) -> None:
    save(SmallModelFactory("bert", saved)(), tmp_path)
    ours, plain = loaded_by_both(getattr(transformers, kind), tmp_path)
    notes = " ".join(vars(ours)["_shardformer_loading"])
    assert_same(materialize(ours), plain)
    new, _, unused = notes.partition("In the files, but not in this model: ")
    assert head in new.partition("Not in the files, so randomly initialized: ")[2] and other in unused


def test_an_auto_class_accepts_config_fields(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    model = from_pretrained(transformers.AutoModelForSequenceClassification, tmp_path, num_labels=7)
    assert type(model) is transformers.BertForSequenceClassification
    assert model.get_parameter("classifier.weight").shape[0] == 7


def test_the_generation_config_is_loaded(tmp_path: Path) -> None:
    model: Any = SmallModelFactory("gpt2")()
    model.generation_config.max_new_tokens = 17
    model.generation_config.save_pretrained(tmp_path)
    save(model, tmp_path)
    ours: Any = from_pretrained(type(model), tmp_path)
    assert ours.generation_config.max_new_tokens == 17 and ours.name_or_path == str(tmp_path)


def test_tied_weights_saved_twice_are_tied_if_equal(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    table = state["bert.embeddings.word_embeddings.weight"]
    for same in (True, False):
        save_file({**state, "cls.predictions.decoder.weight": table.clone() if same else table + 1}, file)
        ours, plain = loaded_by_both(transformers.BertForMaskedLM, tmp_path)
        assert_same(materialize(ours), plain)


@pytest.mark.slow
@pytest.mark.feature("lazy initialization")
@pytest.mark.reduced(family=("llama", "gpt2", "t5", "vit", "blip-2"))
# chatglm is not in transformers
@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize(("family", "size"), in_turn(sorted(SMALL_CONFIGS.keys() - {"chatglm"}), (2,), (4,)))
def test_a_training_step_is_that_of_the_loaded_model(family: str, size: int, tmp_path: Path) -> None:
    sample = SmallModelFactory(family)
    kind: Any = getattr(transformers, sample.head_class)
    torch.manual_seed(3)
    save(sample(), tmp_path)
    batch, plain = RandomBatchFactory(sample.head_class)(0), kind.from_pretrained(tmp_path)
    compute_model_loss(plain, batch).backward()
    lazy = [from_pretrained(kind, tmp_path) for _ in range(size)]

    def train(context: ParallelContext) -> None:
        rank = context.tensor.rank
        model = shard_model(lazy[rank], context=context)
        assert str(tmp_path) in str(describe_sharding(model))
        compute_model_loss(model, batch).backward()
        specs = get_shard_specs(model)
        for name, param in model.named_parameters():
            full = plain.get_parameter(name)
            assert torch.equal(param, specs[name].slice_full_tensor(full, {"tensor": rank})), name
            if full.grad is not None:
                torch.testing.assert_close(
                    param.grad, specs[name].slice_full_tensor(full.grad, {"tensor": rank}), rtol=1e-4, atol=1e-6
                )

    run_as_threads(train, tensor=size)


def test_new_heads_are_identical_on_ranks_with_different_seeds(tmp_path: Path) -> None:
    save(SmallModelFactory("bert", "BertModel")(), tmp_path)
    lazy = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        lazy.append(from_pretrained(transformers.BertForSequenceClassification, tmp_path))

    def head(context: ParallelContext) -> tuple[torch.Tensor, str]:
        model = shard_model(lazy[context.tensor.rank], context=context)
        return model.get_parameter("classifier.weight"), str(describe_sharding(model))

    (one, said), (other, _) = run_as_threads(head, tensor=2)
    assert torch.equal(one, other)
    assert "Not in the files, so randomly initialized: classifier.bias, classifier.weight" in said


def test_files_may_be_overwritten_after_materialization(tmp_path: Path) -> None:
    plain: Any = BERT()
    save(plain, tmp_path)
    ours = materialize(from_pretrained(transformers.BertForMaskedLM, tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(ours.get_parameter("cls.predictions.bias"), plain.get_parameter("cls.predictions.bias"))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config.*Check the path"):
        from_pretrained(transformers.BertModel, tmp_path / "nowhere")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    BERT.get_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"contains neither model.safetensors nor"):
        from_pretrained(transformers.BertModel, tmp_path)


def test_a_missing_file_of_the_index_is_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path, shard_size="60KB")
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ConfigError, match=r"model-00002.*cannot be read.*No such file"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model", None], ids=["empty", "text", "cut short"])
def test_an_invalid_safetensors_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ConfigError, match=r"model.safetensors' cannot be read.*again"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path)


def test_files_deleted_before_materialization_are_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    model = from_pretrained(transformers.BertForMaskedLM, tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigError, match="changed or became unreadable"):
        run_as_threads(lambda context: shard_model(model, context=context), tensor=1)


def test_mismatched_shapes_are_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    with pytest.raises(ConfigError, match=r"dense.bias' with shape \(70,\), but .* expects \(80,\)"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path, intermediate_size=80)


def test_a_head_for_other_classes_is_initialized_as_in_transformers(tmp_path: Path) -> None:
    kind = transformers.BertForSequenceClassification
    kind(BERT.get_config()).save_pretrained(tmp_path)
    options: dict[str, Any] = {"num_labels": 5, "ignore_mismatched_sizes": True}
    torch.manual_seed(4)
    expected = kind.from_pretrained(tmp_path, **options)
    torch.manual_seed(4)
    found = from_pretrained(kind, tmp_path, **options)
    assert "randomly initialized: classifier.bias, classifier.weight." in str(vars(found))
    assert_same(materialize(found), expected)


def test_missing_layers_are_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    with pytest.raises(ConfigError, match=r"no weights for .* bert.encoder.layer.2\..*config with as many layers"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path, num_hidden_layers=3)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"other.{name}": value for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"None of the weights in .* belong to BertForMaskedLM.*'other\."):
        from_pretrained(transformers.BertForMaskedLM, tmp_path)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    with pytest.raises(ConfigError, match="no option 'hiden_size'"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path, hiden_size=3)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save(BERT(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConfigError, match="does not support the quantized weights"):
        from_pretrained(transformers.BertForMaskedLM, tmp_path)


def test_ranks_that_read_different_files_are_refused(tmp_path: Path) -> None:
    folders = [
        save(SmallModelFactory("bert")(), tmp_path / "a"),
        save(SmallModelFactory("bert")(), tmp_path / "b", shard_size="60KB"),
    ]
    lazy = [from_pretrained(transformers.BertForMaskedLM, folder) for folder in folders]
    with pytest.raises(ConfigError, match="The ranks read different weight files"):
        run_as_threads(lambda context: shard_model(lazy[context.tensor.rank], context=context), tensor=2)
