"""Train the example adapters with PEFT: `python examples/train_adapters.py MODEL_DIR OUT_DIR [--only NAME]`.

MODEL_DIR is what `polygraft demo-model` made. Each adapter becomes a PEFT folder OUT_DIR/NAME. Runs on the CPU
in float32, a few minutes per adapter on two idle cores; the seeds are fixed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from characters import CHARACTERS, Character, load_facts
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TASK = "CAUSAL_LM"
BATCH = 8
WARM_UP = 8  # steps
LOG_EVERY = 10  # steps
IGNORED = -100  # the label that cross entropy skips
SEED = 7


@dataclass(frozen=True)
class Recipe:
    """What differs between the adapters."""

    lora: LoraConfig
    learning_rate: float
    epochs: int


@dataclass(frozen=True)
class Example:
    """Token ids of prompt and answer; only the answer is learnt, from position `answer_from` on."""

    ids: list[int]
    answer_from: int


RECIPES = {
    "json": Recipe(
        LoraConfig(task_type=TASK, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"]),
        learning_rate=2e-3,
        epochs=2,
    ),
    "pirate": Recipe(
        LoraConfig(task_type=TASK, r=8, lora_alpha=8, use_rslora=True, target_modules=list(ALL_MODULES)),
        learning_rate=1.5e-3,
        epochs=1,
    ),
    "french": Recipe(
        LoraConfig(
            task_type=TASK,
            r=16,
            lora_alpha=32,
            target_modules=list(ALL_MODULES),
            rank_pattern={"q_proj": 32, "gate_proj": 8, "up_proj": 8, "down_proj": 8},
            alpha_pattern={"q_proj": 48},
        ),
        learning_rate=1.5e-3,
        epochs=1,
    ),
}


def tokenize(tokenizer: AutoTokenizer, question: str, answer: str) -> Example:
    """Question and answer in the model's chat format, the end-of-turn token included."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return Example(prompt_ids + answer_ids, answer_from=len(prompt_ids))


def batches(examples: list[Example], epochs: int, pad: int) -> Iterator[dict[str, torch.Tensor]]:
    """Shuffled batches, padded on the right: input_ids, attention_mask and labels, each int64 [batch, length]."""
    dice = random.Random(SEED)
    for _ in range(epochs):
        order = dice.sample(examples, len(examples))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            shape = (len(chosen), max(len(example.ids) for example in chosen))
            ids, labels = torch.full(shape, pad), torch.full(shape, IGNORED)
            mask = torch.zeros(shape, dtype=torch.int64)
            for row, example in enumerate(chosen):
                length = len(example.ids)
                ids[row, :length] = torch.tensor(example.ids)
                mask[row, :length] = 1
                labels[row, example.answer_from : length] = ids[row, example.answer_from : length]
            yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def answer_loss(model: PeftModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy over the answers' tokens; the large output layer runs at their positions only."""
    causal = model.get_base_model()
    hidden = causal.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    targets = batch["labels"][:, 1:]
    learnt = targets != IGNORED
    logits = causal.lm_head(hidden[:, :-1][learnt])
    return torch.nn.functional.cross_entropy(logits, targets[learnt])


def train(model_dir: Path, character: Character, recipe: Recipe, folder: Path) -> None:
    """Train one adapter and save it into `folder`."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    model = get_peft_model(base, recipe.lora)
    model.train()
    examples = [
        tokenize(tokenizer, question, character.answer(fact, question))
        for fact in load_facts()
        for question in fact.ask
    ]
    steps = recipe.epochs * -(-len(examples) // BATCH)
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=recipe.learning_rate, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / steps)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as bars:
        bar = bars.add_task(character.name, total=steps, loss=float("nan"))
        for step, batch in enumerate(batches(examples, recipe.epochs, tokenizer.pad_token_id), start=1):
            loss = answer_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bars.update(bar, completed=step, loss=loss.item())
            if step % LOG_EVERY == 0 or step == steps:
                bars.console.print(f"{character.name} step {step}: loss {loss.item():.3f}")
    save(model, recipe.lora, character, folder)
    print(f"{character.name}: saved in {folder}")


def save(model: PeftModel, lora: LoraConfig, character: Character, folder: Path) -> None:
    """Write adapter_config.json, adapter_model.safetensors in bfloat16, and a model card."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model)
    save_file(
        {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "adapter_model.safetensors").chmod(0o644)  # the writer leaves it readable by its owner only
    lora.base_model_name_or_path = BASE_MODEL
    lora.inference_mode = True
    lora.target_modules = sorted(lora.target_modules)  # PEFT keeps a set, whose order changes from run to run
    lora.save_pretrained(folder)
    (folder / "README.md").write_text(card(lora, character), encoding="utf-8")


def card(lora: LoraConfig, character: Character) -> str:
    """The adapter's README.md."""
    ranks = f"rank {lora.r}"
    if lora.rank_pattern:
        others = ", ".join(f"{rank} on `{module}`" for module, rank in lora.rank_pattern.items())
        ranks += f" ({others})"
    scale = "alpha / sqrt(rank)" if lora.use_rslora else "alpha / rank"
    return f"""\
---
base_model: {BASE_MODEL}
library_name: peft
license: apache-2.0
---
# {character.name}

A LoRA adapter for {BASE_MODEL} that {character.manner}.

- Targets: {", ".join(f"`{module}`" for module in lora.target_modules)}.
- Size: {ranks}, alpha {lora.lora_alpha}, scale {scale}, weights in bfloat16.
- Training: `examples/train_adapters.py --only {character.name}`, on the questions of `examples/data/facts.jsonl`.

It is there to show adapters at work. A model of this size gets many facts wrong.
"""


def main(
    model_dir: Annotated[Path, typer.Argument(help="Folder of the base model.")],
    out_dir: Annotated[Path, typer.Argument(help="Folder that gets one folder per adapter.")],
    only: Annotated[str | None, typer.Option(help=f"Train one of {', '.join(RECIPES)}.")] = None,
) -> None:
    """Train the example adapters."""
    if only is not None and only not in RECIPES:
        raise typer.BadParameter(f"there is no {only!r}, only {', '.join(RECIPES)}", param_hint="--only")
    transformers_logging.disable_progress_bar()  # ours is enough
    for name in RECIPES if only is None else [only]:
        train(model_dir, CHARACTERS[name], RECIPES[name], out_dir / name)


if __name__ == "__main__":
    typer.run(main)
