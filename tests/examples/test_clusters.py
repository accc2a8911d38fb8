"""The files of examples/clusters are valid and use options that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "clusters"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sbatch")), ids=lambda path: path.stem)
def test_a_batch_script_has_valid_syntax(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "signal"} <= options.keys()
    assert "srun" in script.read_text()


def test_the_launcher_accepts_the_options_of_the_batch_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    text = (FOLDER / "slurm_per_node.sbatch").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"shardformer run ([^']*)'", text)
    values = {"$SLURM_NNODES": "2", "$SLURM_NODEID": "0", "$HEAD_NODE": "host0"}
    words = [values.get(word, word) for word in shlex.split(command)]
    options = get_args_parser().parse_args(words)
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == ("2", 0, "8")
    assert (options.master_addr, options.training_script) == ("host0", "train.py")


def test_the_manifest_starts_one_process_per_gpu() -> None:
    job = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for spec in replicas.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
