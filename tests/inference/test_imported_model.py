"""An imported model reads and ends texts as transformers has it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.huggingface.hand_made import write_llama
from tests.support.command import Silent
from threefold.data.tokenizer import TextRule, beginning_of
from threefold.errors import UserError
from threefold.huggingface.import_hf import Import, import_model
from threefold.inference.eval_tasks import LastWord, Perplexity, score
from threefold.inference.generate import GenerationRequest, Sampling, generate
from threefold.inference.model import Trained

PROMPTS = ["If the file", "x", "The quick brown fox jumps over it", "a b c"]
ENDS = list(range(2, 301, 5))
"""So many that some text ends early."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose texts begin with <s>, and end with any of several tokens.

    Its tokenizer.json holds the state that transformers writes after a padded and truncated call, and ignores.
    """
    from pydoc_data.topics import topics

    folder = write_llama(tmp_path_factory.mktemp("words") / "hf", {"eos_token_id": ENDS[0], "bos_token_id": 1})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=301, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_padding(length=24, pad_id=2, pad_token="</s>", direction="left")
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, "bos_token_id": 1}))
    return folder


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run = tmp_path_factory.mktemp("imported") / "run"
    import_model(Import(source, run), Silent())
    return Trained.find(run)


@pytest.fixture(scope="module")
def theirs(source: Path) -> tuple[Any, Any]:
    """Their tokenizer and their model."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()


def test_greedy_text_is_theirs(trained: Trained, theirs: tuple[Any, Any]) -> None:
    tokenizer, model = theirs
    expected, lengths = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert trained.documents().text.encode(prompt) == ids[0].tolist()
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False, pad_token_id=0
        )
        lengths.append(whole.shape[1] - ids.shape[1])
        ended = int(whole[0, -1]) in ENDS
        expected.append(tokenizer.decode(whole[0, : -1 if ended else None], skip_special_tokens=True))
    assert 1 < max(lengths) > min(lengths) < 25
    run = trained.checkpoint.path.parent.parent
    assert generate(run, PROMPTS, GenerationRequest(25, Sampling(temperature=0))) == expected


def test_perplexity_is_theirs(trained: Trained, theirs: tuple[Any, Any]) -> None:
    tokenizer, model = theirs
    losses = []
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        losses += [model(ids, labels=ids).loss.item()] * (ids.shape[1] - 1)
    work = Perplexity(64, 32).prepare(trained.documents(), PROMPTS, lambda: None)
    found = {
        figure.name: figure.value
        for figure in Perplexity(64, 32).metrics(work, score(trained.load(), work.texts, work.windows, 4))
    }
    assert found["tokens"] == len(losses)
    assert math.isclose(found["loss"], sum(losses) / len(losses), rel_tol=1e-5)


def test_a_last_word_is_counted_from_where_it_is(trained: Trained) -> None:
    work = LastWord(64).prepare(trained.documents(), ["The fox"], lambda: None)
    (window,), (tokens,) = work.windows, work.texts
    assert trained.tokenizer().decode(tokens[window.first :].tolist()) == " fox"


def trained_on(trained: Trained, **facts: Any) -> Trained:
    """As if it had seen data."""
    seen = replace(trained.checkpoint.facts, documents=3, **facts)
    return Trained(replace(trained.checkpoint, facts=seen), trained.config)


def test_a_trained_model_reads_as_its_data_was(trained: Trained) -> None:
    for special_tokens in ("parse", "text"):
        model = trained_on(trained, special_tokens=special_tokens, beginning=(1,))
        assert model.documents().text.rule == TextRule(special_tokens, (1,))
        other = "text" if special_tokens == "parse" else "parse"
        assert model.documents(other).text.rule == TextRule(other, (1,))


def test_tokens_beyond_the_embedding_are_refused_before_the_model_reads_them(trained: Trained, tmp_path: Path) -> None:
    """As a checkpoint of somebody else may have them, whose files fit their checksums."""
    for facts in ({"eod": 301}, {"eod": 1 << 40}, {"beginning": (1, 1 << 40), "special_tokens": "parse"}):
        with pytest.raises(
            UserError, match=r"was trained with token [0-9,]+ around texts and the model's embedding has"
        ):
            trained_on(trained, **facts).documents()
    (tmp_path / "tokenizer.json").write_text(
        Tokenizer(models.WordLevel({f"w{number}": number for number in range(302)}, unk_token="w0")).to_str()
    )
    other = Trained(replace(trained.checkpoint, path=tmp_path), trained.config)
    with pytest.raises(UserError, match=r"has token ids up to 301 and the model's embedding has 301 rows; put the mod"):
        other.documents()


def test_what_comes_after_a_text_is_no_beginning(source: Path) -> None:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    for template, beginning in (("$A </s>", ()), ("<s> <s> $A </s>", (1, 1)), ("$A", ())):
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", 1), ("</s>", 2)])
        assert beginning_of(tokenizer) == beginning


def test_files_that_say_no_json_are_refused(source: Path, tmp_path: Path) -> None:
    copy = write_llama(tmp_path / "hf")
    (copy / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(UserError, match=r"generation_config.json: it is not JSON"):
        import_model(Import(copy, tmp_path / "run"), Silent())
    assert not (tmp_path / "run").exists()
