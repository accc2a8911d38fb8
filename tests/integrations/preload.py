"""Imports that nearly every worker of these tests needs. The fork server of the worker pools runs them once."""

from __future__ import annotations

import gc
import importlib

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch
import transformers
import trl

torch.set_num_threads(1)
for name in ("Trainer", "Seq2SeqTrainer", "LlamaForCausalLM", "GPT2LMHeadModel", "BertForSequenceClassification"):
    getattr(transformers, name)
for name in ("SFTTrainer", "DPOTrainer"):
    getattr(trl, name)
for name in ("train_command.run", "integrations.lightning", "integrations.peft_models", "integrations.trl"):
    importlib.import_module(f"shardformer.{name}")

# imported objects are never garbage, so the workers need not traverse them and copy their pages
gc.collect()
gc.freeze()
