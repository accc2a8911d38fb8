"""Faults of the engine, the trainer and its hooks, the data, and runs from files."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "engine")

MUTANTS = [
    mutant(
        "augmentation-depends-on-the-ranks",
        "shardformer/training/sample_order.py",
        "for i, n in enumerate(batch[local_slice], local_slice.start)]",
        "for i, n in enumerate(batch[local_slice])]",
        "Random augmentation of a sample changes with the number of data ranks.",
        first=("tests/engine/test_data.py::test_random_augmentation_is_independent_of_layout_workers_and_restarts",),
    ),
    mutant(
        "each-epoch-in-the-same-order",
        "shardformer/training/sample_order.py",
        'return torch.Generator().manual_seed(hash_to_seed(seed, epoch, "order"))',
        'return torch.Generator().manual_seed(hash_to_seed(seed, "order"))',
        "Every epoch has the order of the first epoch.",
        first=("tests/engine/test_data.py::test_every_epoch_is_shuffled_anew_unless_shuffle_is_false",),
    ),
    mutant(
        "loaded-position-keeps-the-seed",
        "shardformer/training/data_loader.py",
        'self.epoch, self.seen, self.seed = state["epoch"], state["seen"], state["seed"]',
        'self.epoch, self.seen = state["epoch"], state["seen"]',
        "A run that resumes with another seed in its script repeats some samples and never sees others.",
        first=("tests/engine/test_data.py", "tests/engine/test_engine.py"),
    ),
    mutant(
        "evaluation-weighs-by-samples",
        "shardformer/pipeline/pipeline.py",
        "counted = head.counted if head.counted is not None else float(sum(head.sizes))",
        "counted = float(sum(head.sizes))",
        "The validation loss is not the mean over all tokens if batches have different numbers of tokens.",
        first=(
            "tests/engine/test_engine.py::test_evaluate_weights_batches_by_their_counted_labels",
            "tests/engine/test_engine.py::test_evaluate_returns_the_mean_loss_of_all_batches",
            "tests/trainer/test_trainer.py::test_the_validation_loss_is_the_mean_over_all_counted_labels",
        ),
    ),
    mutant(
        "scheduler-moves-on-skipped-steps",
        "shardformer/training/engine.py",
        'if is_updated:\n            self._step_schedulers("step")',
        'if True:\n            self._step_schedulers("step")',
        "The scheduler steps after skipped steps.",
        first=(
            "tests/engine/test_engine.py::test_the_scheduler_does_not_step_after_a_skipped_step",
            "tests/engine/test_engine.py",
        ),
    ),
    mutant(
        "loss-of-data-ranks-summed",
        "shardformer/training/engine.py",
        'return all_reduce(loss, self.context.data, purpose="loss") / self.context.data.size',
        'return all_reduce(loss, self.context.data, purpose="loss")',
        'With average="ranks" the reported loss is multiplied by the number of data ranks.',
        first=(
            "tests/engine/test_engine.py::test_averaging_over_ranks_returns_the_mean_of_their_losses",
            "tests/engine/test_engine.py::test_two_processes_give_the_weights_of_one",
        ),
    ),
    mutant(
        "reshape-keeps-the-old-share-of-data",
        "shardformer/training/engine.py",
        "            self.data.set_parallel_context(context)\n",
        "            self.data.check_num_data_ranks(context.data.size)\n",
        "After reshard, ranks continue with their old shard of each batch.",
        first=("tests/engine/test_reshape.py",),
    ),
    mutant(
        "stopped-run-loses-a-batch",
        "shardformer/training/trainer.py",
        "                    data.load_state(self._position)  # this batch was not used\n",
        "",
        "A run that a signal or a hook stopped resumes one batch too late.",
        first=("tests/trainer/test_trainer.py::test_a_stopped_run_resumes_with_the_next_batch",),
    ),
    mutant(
        "average-counts-skipped-steps",
        "shardformer/training/hooks/moving_average.py",
        "if was_skipped or engine.steps % self.every:",
        "if engine.steps % self.every:",
        "The moving average is updated in skipped steps.",
        first=(
            "tests/trainer/hooks/test_moving_average.py::test_a_skipped_step_does_not_update_the_average",
            "tests/trainer/hooks/test_moving_average_faults.py",
            "tests/trainer/hooks/test_moving_average.py",
        ),
    ),
    mutant(
        "metrics-of-own-samples",
        "shardformer/training/hooks/metrics.py",
        "gathered = all_gather_objects(local_pairs, trainer.engine.context.data)",
        "gathered = [local_pairs]",
        "Accuracy covers only the samples of one data rank.",
        first=("tests/trainer/hooks/test_metrics.py::test_metrics_equal_those_of_sklearn_over_all_samples",),
    ),
    mutant(
        "patience-starts-again",
        "shardformer/training/hooks/early_stopping.py",
        'self.best, self.without_progress = state["best"], state["without_progress"]',
        'self.best, self.without_progress = state["best"], 0',
        "Early stopping restarts its count after a restart.",
        first=("tests/trainer/hooks/test_early_stopping.py",),
    ),
    mutant(
        "records-lose-the-resumed-step",
        "shardformer/training/metrics_log.py",
        "if record.step <= resume_step]",
        "if record.step < resume_step]",
        "A resumed run loses the record of the step at which it resumes.",
        first=("tests/trainer/test_records.py",),
    ),
    mutant(
        "first-step-without-a-learning-rate",
        "shardformer/train_command/build.py",
        "return (step + 1) / num_warmup_steps",
        "return step / num_warmup_steps",
        "The first step of a run with warm-up has a learning rate of 0.",
        first=(
            "tests/runs/test_updates.py::test_learning_rate_of_each_step",
            "tests/runs",
        ),
    ),
    mutant(
        "schedule-counts-dropped-batches",
        "shardformer/train_command/build.py",
        "samples // size if config.data.drop_last else -(-samples // size)",
        "-(-samples // size)",
        "With drop_last the learning rate does not reach its final value.",
        first=(
            "tests/runs/test_updates.py::test_the_number_of_steps_equals_the_number_of_batches",
            "tests/runs",
        ),
    ),
    mutant(
        "validation-numbers-its-own-classes",
        "shardformer/train_command/load_data.py",
        "return encode_labels(get_label_column(rows, self.config.data.label)[0], self.classes, is_validation)",
        "found = get_label_column(rows, self.config.data.label)[0]\n"
        "        return encode_labels(found, infer_label_classes(found), is_validation)",
        "Validation data that lacks a class is compared with wrong labels.",
        first=(
            "tests/runs/test_data.py::test_validation_data_without_some_class_uses_the_training_indices",
            "tests/runs/test_data.py::test_texts_have_classes",
        ),
    ),
]
