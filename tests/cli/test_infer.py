"""``shardformer derive-policy``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from shardformer.cli import main
from shardformer.discovery.shrink_config import shrink_config
from shardformer.policies.role_policy import RolePolicy


@pytest.mark.slow
def test_the_printed_policy_can_be_saved_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = shrink_config(transformers.AutoConfig.for_model("mistral", architectures=["MistralForCausalLM"]))
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["infer", str(tmp_path), "--name", "MistralPolicy"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert said.startswith(
        "# The policy was derived, and validated on a reduced model over 2 and 4 tensor ranks and over two\n"
        "#   pipeline stages.\n"
    )
    names: dict[str, Any] = {}
    exec(said, names)
    assert issubclass(names["MistralPolicy"], RolePolicy) and names["MistralPolicy"].embeddings == ("embed_tokens",)


def test_an_invalid_class_name_raises(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a b", "class", ""):
        with pytest.raises(SystemExit):
            main(["infer", "bert", "--name", name])
        assert f"--name {name!r}" in capsys.readouterr().err


def test_a_missing_model_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["infer", str(tmp_path)])
    assert "does not contain a config.json" in capsys.readouterr().err
