"""embed_tokens and lm_head: which tensor stands for what, and what is refused in the words of the training options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polygraft_adapters import AdapterError, ModuleShapes, Problem, inspect_adapter
from polygraft_adapters.weights import AdapterWeights, load_adapter

Tensors = dict[str, Tensor]
Write = Callable[..., Path]
EMBED = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
V, K = 32, 64


@pytest.fixture
def tied(shapes: ModuleShapes) -> ModuleShapes:
    return replace(shapes, tied=True)


def table(seed: int = 0, rows: int = V) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))


def load(folder: Path, shapes: ModuleShapes) -> AdapterWeights:
    loaded = load_adapter(folder, shapes, 16, torch.float32)
    loaded.check()
    assert loaded.info == inspect_adapter(folder, shapes, 16)
    return loaded


def problems_of(folder: Path, shapes: ModuleShapes) -> list[Problem]:
    with pytest.raises(AdapterError) as caught:
        inspect_adapter(folder, shapes, 16)
    with pytest.raises(AdapterError) as again:
        load_adapter(folder, shapes, 16, torch.float32)
    assert again.value.problems == caught.value.problems
    return list(caught.value.problems)


def weight_of(weights: AdapterWeights, name: str) -> Tensor | None:
    return weights.tables[name].weight if name in weights.tables else None


def test_lora_on_both_tables(write: Write, shapes: ModuleShapes) -> None:
    tensors = {
        f"{EMBED}.lora_embedding_A": torch.rand(4, V),
        f"{EMBED}.lora_embedding_B": torch.rand(K, 4),
        f"{HEAD}.lora_A.weight": torch.rand(6, K),
        f"{HEAD}.lora_B.weight": torch.rand(V, 6),
    }
    loaded = load(write(tensors, r=4, rank_pattern={"lm_head": 6}, alpha_pattern={"embed_tokens": 1}), shapes)
    assert loaded.info.targets == ("embed_tokens", "lm_head")
    assert loaded.info.rank == 6
    embedding, head = loaded.tables["embed_tokens"].lora, loaded.tables["lm_head"].lora
    assert embedding is not None
    assert head is not None
    assert embedding.scale == 0.25
    assert head.scale == pytest.approx(16 / 6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EMBED}.lora_A.weight", (8, K)),
        (f"{HEAD}.lora_embedding_A", (8, V)),
        (f"{HEAD}.bias", (V,)),
        (f"{EMBED}.lora_B.bias", (V,)),
    ],
)
def test_what_a_table_cannot_have_is_refused(
    write: Write, tensors: Tensors, shapes: ModuleShapes, name: str, shape: tuple[int, ...]
) -> None:
    (problem,) = problems_of(write({**tensors, name: torch.rand(shape)}), shapes)
    assert "is no tensor that" in problem.problem


@pytest.mark.parametrize("name", ["weight", "modules_to_save.weight", "modules_to_save.default.weight"])
def test_a_saved_module_is_replaced_alone(
    write: Write, tensors: Tensors, shapes: ModuleShapes, tied: ModuleShapes, name: str
) -> None:
    tensors[f"{HEAD}.{name}"] = table()
    for model in (shapes, tied):
        loaded = load(write(tensors, modules_to_save=["lm_head"]), model)
        assert torch.equal(loaded.tables["lm_head"].weight, table())  # type: ignore[arg-type]
        assert weight_of(loaded, "embed_tokens") is None
        assert loaded.info.targets == ("q_proj", "down_proj", "lm_head")


def test_a_table_saved_along_is_the_bases(
    write: Write, tensors: Tensors, shapes: ModuleShapes, tied: ModuleShapes
) -> None:
    folder = write({**tensors, f"{EMBED}.weight": table()})
    assert weight_of(load(folder, shapes), "lm_head") is None
    both = load(folder, tied)  # which has one table
    assert weight_of(both, "lm_head") is weight_of(both, "embed_tokens")
    assert both.nbytes == load(folder, shapes).nbytes, "one tensor, told twice"


def test_a_saved_module_leaves_the_base_of_the_other_table(write: Write, tensors: Tensors, tied: ModuleShapes) -> None:
    copies = {f"{HEAD}.{name}": table(1) for name in ("weight", "modules_to_save.weight")}
    along = {f"{HEAD}.original_module.weight": table(2), f"{EMBED}.weight": table(2)}
    loaded = load(write({**tensors, **copies, **along}, modules_to_save=["lm_head"]), tied)
    assert torch.equal(loaded.tables["lm_head"].weight, table(1))  # type: ignore[arg-type]
    assert torch.equal(loaded.tables["embed_tokens"].weight, table(2))  # type: ignore[arg-type]


def test_tied_tables_that_are_saved_tied_are_one(write: Write, tensors: Tensors, tied: ModuleShapes) -> None:
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    for names in ((EMBED,), (HEAD,), (EMBED, HEAD)):
        loaded = load(write({**tensors, **{f"{name}.weight": table() for name in names}}, **options), tied)
        assert torch.equal(loaded.tables["lm_head"].weight, table())  # type: ignore[arg-type]
        assert weight_of(loaded, "embed_tokens") is weight_of(loaded, "lm_head")


def test_copies_that_differ_are_refused(
    write: Write, tensors: Tensors, shapes: ModuleShapes, tied: ModuleShapes
) -> None:
    names = {f"{HEAD}.weight": table(1), f"{HEAD}.modules_to_save.weight": table(2)}
    (problem,) = problems_of(write({**tensors, **names}, modules_to_save=["lm_head"]), shapes)
    assert problem.where == f"{HEAD}.modules_to_save.weight"
    assert f"not the same as {HEAD}.weight" in problem.problem
    names = {f"{HEAD}.weight": table(1), f"{EMBED}.weight": table(2)}
    assert load(write({**tensors, **names}), shapes).info.targets[-2:] == ("embed_tokens", "lm_head")
    (problem,) = problems_of(write({**tensors, **names}), tied)
    assert problem.where == f"{EMBED}.weight"


def test_copies_saved_tied_that_differ_are_refused_of_which_peft_gives_one_to_both(
    write: Write, tensors: Tensors, shapes: ModuleShapes, tied: ModuleShapes
) -> None:
    tensors |= {f"{EMBED}.weight": table(1), f"{HEAD}.weight": table(2)}
    for saved in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]):
        (problem,) = problems_of(write(tensors, modules_to_save=saved, ensure_weight_tying=True), tied)
        assert problem.where == f"{HEAD}.weight"
        assert "not the same as" in problem.problem
        assert "set it to false" in problem.hint
    apart = {"modules_to_save": ["embed_tokens", "lm_head"]}
    for folder, model in ((write(tensors, **apart, ensure_weight_tying=True), shapes), (write(tensors, **apart), tied)):
        assert torch.equal(weight_of(load(folder, model), "lm_head"), table(2))  # type: ignore[arg-type]


def test_lora_trained_tied_that_differs_is_refused_of_which_peft_gives_one_to_both(
    write: Write, tensors: Tensors, shapes: ModuleShapes, tied: ModuleShapes
) -> None:
    a, b = torch.rand(8, V), torch.rand(K, 8)
    embedding = {f"{EMBED}.lora_embedding_A": a, f"{EMBED}.lora_embedding_B": b}
    head = {f"{HEAD}.lora_A.weight": b.T.contiguous(), f"{HEAD}.lora_B.weight": a.T.contiguous()}
    both = write({**tensors, **embedding, **head}, ensure_weight_tying=True)
    assert load(both, tied).info.targets[-2:] == ("embed_tokens", "lm_head")
    other = {**tensors, **embedding, **head, f"{HEAD}.lora_B.weight": torch.rand(V, 8)}
    (problem,) = problems_of(write(other, ensure_weight_tying=True), tied)
    assert problem.where == f"{HEAD}.lora_B.weight"
    assert f"not the transpose of {EMBED}.lora_embedding_A" in problem.problem
    assert "set it to false" in problem.hint
    load(write(other), tied)
    load(write(other, ensure_weight_tying=True), shapes)
    for alone, name in ((embedding, "embed_tokens"), (head, "lm_head")):
        (problem,) = problems_of(write({**tensors, **alone}, ensure_weight_tying=True), tied)
        assert f"is LoRA on {name}, but the file has none on" in problem.problem
        load(write({**tensors, **alone}), tied)


def test_lora_trained_tied_of_two_ranks_is_refused(write: Write, tensors: Tensors, tied: ModuleShapes) -> None:
    embedding = {f"{EMBED}.lora_embedding_A": torch.rand(8, V), f"{EMBED}.lora_embedding_B": torch.rand(K, 8)}
    head = {f"{HEAD}.lora_A.weight": torch.rand(4, K), f"{HEAD}.lora_B.weight": torch.rand(V, 4)}
    folder = write({**tensors, **embedding, **head}, ensure_weight_tying=True, rank_pattern={"lm_head": 4})
    assert {problem.where for problem in problems_of(folder, tied)} == set(head)


@pytest.mark.parametrize("name", [f"{HEAD}.weight", f"{EMBED}.weight", f"{EMBED}.base_layer.weight"])
def test_resized_vocabularies_are_refused_with_the_options_that_cause_them(
    write: Write, tensors: Tensors, shapes: ModuleShapes, name: str
) -> None:
    saved = [] if "base_layer" in name else ["lm_head" if "lm_head" in name else "embed_tokens"]
    (problem,) = problems_of(write({**tensors, name: table(rows=V + 64)}, modules_to_save=saved), shapes)
    assert problem.where == name
    assert "has 96 rows, and the served model has a vocabulary of 32" in problem.problem
    for option in ("resize_vocab", "add_tokens", "save_embedding_layers", "modules_to_save", "trainable_token_indices"):
        assert option in problem.hint


def test_tables_of_another_width_and_shards_are_told_apart(write: Write, shapes: ModuleShapes) -> None:
    (problem,) = problems_of(write({f"{HEAD}.weight": torch.rand(V, 48)}, modules_to_save=["lm_head"]), shapes)
    assert "needs [32, 64]" in problem.problem
    (problem,) = problems_of(write({f"{HEAD}.weight": torch.rand(0)}, modules_to_save=["lm_head"]), shapes)
    assert "ZeRO-3" in problem.hint


def test_whole_copies_agree_with_the_config(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    (problem,) = problems_of(write(tensors, modules_to_save=["lm_head"]), shapes)
    assert problem.where == "modules_to_save"
    assert "no lm_head.weight" in problem.problem
    (problem,) = problems_of(write({**tensors, f"{HEAD}.modules_to_save.weight": table()}), shapes)
    assert "modules_to_save does not name" in problem.problem
    assert "resize_vocab, add_tokens or save_embedding_layers" in problem.hint
    lora = {f"{HEAD}.lora_A.weight": torch.rand(8, K), f"{HEAD}.lora_B.weight": torch.rand(V, 8)}
    (problem,) = problems_of(write({**tensors, **lora, f"{HEAD}.weight": table()}), shapes)
    assert "beside LoRA" in problem.problem


def test_retrained_tokens(write: Write, tensors: Tensors, shapes: ModuleShapes, tied: ModuleShapes) -> None:
    tensors[f"{EMBED}.token_adapter.trainable_tokens_delta"] = table(rows=3)
    folder = write(tensors, trainable_token_indices=[9, 2, 31])
    loaded = load(folder, shapes)
    assert loaded.tables.keys() == {"embed_tokens"}
    tokens = loaded.tables["embed_tokens"].tokens
    assert tokens is not None
    assert tokens.ids == (9, 2, 31)
    assert torch.equal(tokens.rows, table(rows=3))
    assert load(folder, tied).tables.keys() == {"embed_tokens", "lm_head"}
    other = {"embed_tokens": [9, 2, 31], "lm_head": [1]}
    tensors[f"{HEAD}.base_layer.token_adapter.trainable_tokens_delta.default"] = table(rows=1)
    head = load(write(tensors, trainable_token_indices=other), tied).tables["lm_head"].tokens
    assert head is not None
    assert head.ids == (1,)
    (problem,) = problems_of(write(tensors, trainable_token_indices=other, ensure_weight_tying=True), tied)
    assert (problem.where, "other rows of lm_head" in problem.problem) == ("trainable_token_indices", True)


def test_retrained_tokens_agree_with_the_config(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    name = f"{EMBED}.token_adapter.trainable_tokens_delta"
    rows = {**tensors, name: table(rows=2)}
    (problem,) = problems_of(write(rows), shapes)
    assert (problem.where, problem.hint) == (name, "trainable_token_indices must be that of the training run")
    (problem,) = problems_of(write(tensors, trainable_token_indices=[1]), shapes)
    assert problem.where == "trainable_token_indices"
    (problem,) = problems_of(write(rows, trainable_token_indices=[1]), shapes)
    assert "1 retrained tokens need [1, 64]" in problem.problem
    (problem,) = problems_of(write(rows, trainable_token_indices=[1, 32]), shapes)
    assert "a vocabulary of 32" in problem.problem
    assert "add_tokens" in problem.hint


def test_what_peft_cannot_combine_is_refused(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    tensors[f"{EMBED}.token_adapter.trainable_tokens_delta"] = table(rows=1)
    lora = {f"{EMBED}.lora_embedding_A": torch.rand(8, V), f"{EMBED}.lora_embedding_B": torch.rand(K, 8)}
    (problem,) = problems_of(write({**tensors, **lora}, trainable_token_indices=[1]), shapes)
    assert "beside LoRA" in problem.problem
    saved = {**tensors, f"{EMBED}.weight": table()}
    options = {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]}
    (problem,) = problems_of(write(saved, **options), shapes)
    assert "modules_to_save replaces" in problem.problem
    found = problems_of(write(lora, lora_bias=True), shapes)
    assert [problem.where for problem in found] == ["lora_bias"]


def test_a_model_that_offers_no_tables_says_so(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    model = replace(shapes, vocabulary=0, hidden=0)
    (problem,) = problems_of(write({**tensors, f"{HEAD}.weight": table()}, modules_to_save=["lm_head"]), model)
    assert problem.where == f"{HEAD}.weight"
    load(write(tensors), model)


def test_the_digest_tells_what_the_tensors_are_for(write: Write, tensors: Tensors, shapes: ModuleShapes) -> None:
    def digest(extra: Tensors, **config: object) -> str:
        return inspect_adapter(write({**tensors, **extra}, **config), shapes, 16).digest

    head = {f"{HEAD}.weight": table()}
    rows = {f"{EMBED}.token_adapter.trainable_tokens_delta": table(rows=2)}
    different = [
        digest({}),
        digest(head),
        digest(head, modules_to_save=["lm_head"]),
        digest(head, modules_to_save=["lm_head"], ensure_weight_tying=True),
        digest(rows, trainable_token_indices=[1, 2]),
        digest(rows, trainable_token_indices=[2, 1]),
    ]
    assert len(set(different)) == len(different)
    assert digest({}, ensure_weight_tying=True, bias="all") == different[0]
