"""Faults of checkpoints: other layouts, damage, atomicity, random states, and which checkpoints are kept."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "checkpoints")

MUTANTS = [
    mutant(
        "numpy-random-state-not-restored",
        "shardformer/random_state.py",
        "numpy.random.set_state(of_numpy)",
        "numpy.random.get_state()",
        "After a load, or for a model that draws with NumPy on several ranks, NumPy's random numbers differ.",
        first=(
            "tests/sharding/test_random.py",
            "tests/checkpoint/test_exact.py",
        ),
    ),
    mutant(
        "random-states-of-another-data-rank",
        "shardformer/checkpoint/load.py",
        'if other.get("data", 0) == coords.get("data", 0)]',
        "if rank >= 0]",
        "After a change of the layout all data ranks go on with the random states of the first.",
        first=(
            "tests/checkpoint/test_layouts.py::test_data_rank_restores_its_own_random_state",
            "tests/checkpoint/test_layouts.py",
            "tests/checkpoint/test_processes.py",
        ),
    ),
    mutant(
        "checksum-of-a-transposed-matrix",
        "shardformer/checkpoint/file_format.py",
        "    x += numpy.uint64(_get_checksum_seed(dim))\n",
        "",
        "A checkpoint in which two numbers of a matrix changed places across its diagonal is loaded.",
        first=("tests/checkpoint/test_parts.py",),
    ),
    mutant(
        "checksum-not-compared",
        "shardformer/checkpoint/load.py",
        "if total % BITS != box.checksum:",
        "if total % BITS != box.checksum and not count:",
        "A checkpoint with a flipped bit is loaded.",
        first=("tests/checkpoint/test_damage.py::test_flipped_bit_is_detected_or_harmless",),
    ),
    mutant(
        "index-checksum-ignored",
        "shardformer/checkpoint/file_format.py",
        'found = json.loads(text) if _compute_sha256(text) == head_values["sha256"] else {}',
        "found = json.loads(text)",
        "A checkpoint whose index was changed is loaded.",
        first=(
            "tests/checkpoint/test_damage.py::test_every_tensor_byte_is_checksummed",
            "tests/checkpoint/test_damage.py::test_damaged_file_is_detected",
        ),
    ),
    mutant(
        "incomplete-checkpoint-is-finished",
        "shardformer/checkpoint/save.py",
        "if (covered := sum(prod(box.size) for box in entry.chunks)) != prod(entry.shape):",
        "if (covered := sum(prod(box.size) for box in entry.chunks)) > prod(entry.shape):",
        "A save to which a rank brings a part of a tensor only is called a checkpoint.",
        first=(
            "tests/checkpoint/test_bad_input.py::test_incomplete_or_duplicate_writes_are_not_published",
            "tests/checkpoint/test_bad_input.py",
        ),
    ),
    mutant(
        "interrupted-save-blocks-the-next",
        "shardformer/checkpoint/directory.py",
        "if found.purpose == SAVING:",
        "if found.purpose == DROPPED and not path.exists():",
        "What a killed save left is never removed.",
        first=(
            "tests/checkpoint/test_damage.py::test_step_can_be_saved_after_killed_save",
            "tests/checkpoint/test_damage.py::test_killed_processes_leave_complete_checkpoints",
            "tests/checkpoint/test_damage.py::test_failed_save_keeps_earlier_checkpoints",
        ),
    ),
    mutant(
        "replaced-checkpoint-removed-first",
        "shardformer/filesystem.py",
        "        target_folder.rename(replaced)\n",
        "        shutil.rmtree(target_folder)\n",
        "A step that is saved again is lost if the process is killed at the wrong moment.",
        first=("tests/checkpoint/test_damage.py::test_replaced_checkpoint_is_kept_until_sync",),
    ),
    mutant(
        "older-checkpoints-go-too-early",
        "shardformer/checkpoint/save.py",
        "    try:\n        files = [*map(get_rank_file_name",
        "    try:\n        delete_old_checkpoints(root, retention, path)\n        files = [*map(get_rank_file_name",
        "Older checkpoints are deleted before the new one is on the disk.",
        first=(
            "tests/checkpoint/test_damage.py::test_older_checkpoints_are_deleted_after_sync",
            "tests/checkpoint/test_damage.py::test_failed_sync_keeps_older_checkpoints_and_raises_in_next_save",
        ),
    ),
    mutant(
        "newest-by-the-clock",
        "shardformer/checkpoint/retention.py",
        "key=lambda pair: (*pair[0], _get_step_folder_name(pair[1]))",
        "key=lambda pair: (pair[0][1], _get_step_folder_name(pair[1]))",
        "On a host whose clock is behind, new checkpoints are deleted and an old one is loaded.",
        first=("tests/checkpoint/test_jobs.py",),
    ),
    mutant(
        "lock-of-a-running-job-is-taken-over",
        "shardformer/filesystem.py",
        "if not (is_own or owner.is_dead or (not owner.is_on_this_machine and _is_lock_file_stale(lock.path))):",
        "if not (is_own or owner.is_on_this_machine or _is_lock_file_stale(lock.path)):",
        "Two jobs of one host save into one folder and delete each other's checkpoints.",
        first=("tests/disk/test_lock.py", "tests/checkpoint/test_jobs.py"),
    ),
    mutant(
        "keep-one-more",
        "shardformer/checkpoint/retention.py",
        "if place >= retention.last and folder != newest_checkpoint and not is_kept and not is_young:",
        "if place > retention.last and folder != newest_checkpoint and not is_kept and not is_young:",
        "keep=3 leaves four checkpoints.",
        first=("tests/checkpoint/test_damage.py::test_retention_keeps_the_specified_checkpoints",),
    ),
    mutant(
        "fp32-model-gets-rounded-weights",
        "shardformer/checkpoint/load.py",
        'return master if is_wider and master in self.index.tensors else f"{WEIGHTS}/{param_name}"',
        'return f"{WEIGHTS}/{param_name}"',
        "A bf16 run that goes on in fp32, or on other ranks, starts from weights rounded to 16 bits.",
        first=(
            "tests/checkpoint/test_layouts.py::test_fp32_model_loads_master_weights_of_16_bit_run",
            "tests/checkpoint/test_layouts.py",
            "tests/checkpoint/test_exact.py",
        ),
    ),
    mutant(
        "kahan-rest-not-loaded",
        "shardformer/checkpoint/load.py",
        "wide = memory if residual is None else memory.to(shard.wide_dtype) + residual.to(shard.wide_dtype)",
        "wide = memory",
        'A run with masters="kahan" loses its compensation when it goes on.',
        first=("tests/checkpoint/test_exact.py", "tests/optim/test_rounding.py"),
    ),
    mutant(
        "stochastic-rounding-starts-again",
        "shardformer/checkpoint/load.py",
        'zero.rounding_counts = [values["rounds"]] * len(zero.rounding_counts)',
        "zero.rounding_counts = list(zero.rounding_counts)",
        'A run with masters="stochastic" that goes on rounds differently than one that was not interrupted.',
        first=("tests/checkpoint/test_exact.py", "tests/optim/test_rounding.py"),
    ),
    mutant(
        "batch-statistics-of-the-first-rank",
        "shardformer/checkpoint/training_state.py",
        "            elif is_front:\n",
        "            elif is_front and data == 0:\n",
        "After a load all data ranks have the batch-norm statistics of the first.",
        first=("tests/checkpoint/test_exact.py::test_buffers_per_data_rank_and_extra_states_are_restored",),
    ),
    mutant(
        "optimizer-state-rounded",
        "shardformer/checkpoint/training_state.py",
        "for slot in self.iter_optimizer_tensors() if keep_saved_dtype else ():",
        "for slot in ():",
        "Adam's fp32 moments of a 16-bit model are rounded to 16 bits by a load.",
        first=(
            "tests/checkpoint/test_exact.py::test_fp32_states_of_16_bit_parameters_are_exact",
            "tests/checkpoint/test_exact.py",
        ),
    ),
    mutant(
        "step-counts-of-the-first-rank",
        "shardformer/checkpoint/training_state.py",
        '    for each in values_by_rank:\n        scalars |= each["scalars"]\n',
        '    for each in values_by_rank[:1]:\n        scalars |= each["scalars"]\n',
        "Adam's step counts of parameters on other stages or shards are lost: bias correction starts again.",
        first=(
            "tests/checkpoint/test_layouts.py::test_step_counts_of_parameters_are_restored",
            "tests/checkpoint/test_layouts.py",
            "tests/checkpoint/test_exact.py",
        ),
    ),
    mutant(
        "narrow-copy-is-sent",
        "shardformer/checkpoint/reshard_in_memory.py",
        "for item in sorted(tensor_items, key=lambda item: -item.dtype.itemsize):",
        "for item in sorted(tensor_items, key=lambda item: item.dtype.itemsize):",
        "reshape sends the 16-bit copy of a number, although the rank also has an fp32 copy.",
        first=("tests/checkpoint/test_move.py::test_wider_of_two_copies_is_sent",),
    ),
]
