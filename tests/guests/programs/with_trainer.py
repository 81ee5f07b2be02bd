"""Hugging Face's Trainer and a tiny model with random weights, as one writes it for torchrun."""

import argparse
from pathlib import Path

import torch
from sentences import LENGTH, WORDS, Sentences
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    set_seed(4)
    training = TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model(), args=training, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=any(Path("checkpoints").glob("checkpoint-*")))
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    torch.save(weights, f"rank{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
