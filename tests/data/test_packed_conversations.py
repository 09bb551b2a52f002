"""Packing conversations: whole ones together, long ones in pieces, every label that counts exactly once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chats import CONVERSATIONS, write_tokenizer
from tests.support.command import Silent
from threefold.config import Config
from threefold.convert.json_lines import JsonLines, PaddedSamples
from threefold.data.corpus import Corpus
from threefold.data.dataset import open_dataset
from threefold.data.encoding import DocumentEncoder
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.packed import PackedSamples
from threefold.data.preparation import prepare
from threefold.data.sources import SourceReader
from threefold.data.tokenizer import SpecialTokens, TextEncoder, load_tokenizer
from threefold.errors import UserError
from threefold.huggingface.packed_conversations import PackedConversations, pack
from threefold.inference.eval_tasks import Perplexity
from threefold.output import SILENT


def write_chats(path: Path) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CONVERSATIONS))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "llama3")


@pytest.fixture
def files(tmp_path: Path, tokenizer: Path) -> TokenFiles:
    lines = write_chats(tmp_path / "chats.jsonl")
    return prepare((lines,), tmp_path / "tokens", tokenizer=tokenizer)


def counted(corpus: Corpus) -> list[int]:
    """The tokens that count, in order; none is the first of its document."""
    assert corpus.loss_mask is not None
    assert not corpus.loss_mask[corpus.documents[:-1]].any()
    return sorted(corpus.tokens[: len(corpus.tokens)][corpus.loss_mask[: len(corpus.tokens)] != 0].tolist())


@pytest.mark.parametrize("length", [1, 2, 7, 16, 64, 104, 105, 500])
def test_every_label_that_counts_comes_once(files: TokenFiles, length: int) -> None:
    samples = PackedConversations.open(files, "train", "1", length)
    tokens, labels = samples.labelled(np.arange(len(samples)))
    assert tokens.shape == labels.shape == (len(samples), length)
    assert sorted(labels[labels != -100].tolist()) == counted(files)
    assert (samples.longer > 0) == (length < 104)


def test_every_token_but_the_first_of_each_counts_where_all_do(files: TokenFiles) -> None:
    samples = PackedConversations.open(files, "train", "1", 64, counts_all=True)
    _, labels = samples.labelled(np.arange(len(samples)))
    assert (labels != -100).sum() == len(files.tokens) - files.document_count


def test_documents_stand_whole_and_apart(files: TokenFiles) -> None:
    samples = PackedConversations.open(files, "train", "1", 160)
    tokens, labels = samples.labelled(np.arange(len(samples)))
    documents = samples.documents(np.arange(len(samples)))
    assert (np.diff(documents, axis=1) >= 0).all()
    spelled = [files.tokens[a:b].tolist() for a, b in zip(files.documents, files.documents[1:], strict=False)]
    found = []
    for row, numbers, last in zip(tokens.tolist(), documents.tolist(), labels[:, -1].tolist(), strict=True):
        for number in set(numbers):
            held = [token for token, own in zip(row, numbers, strict=True) if own == number]
            found.append(held + ([last] if number == numbers[-1] and last != -100 else []))
    assert all(document in found for document in spelled)
    first = np.diff(documents, axis=1, prepend=-1) != 0
    crossing = np.roll(first, -1, axis=1)[:, :-1]
    assert (labels[:, :-1][crossing] == -100).all()


@pytest.mark.parametrize("length", [16, 160])
def test_positions_and_padding(files: TokenFiles, length: int) -> None:
    """Each conversation counts its positions from 0, and only what is beyond the last one is padding."""
    samples = PackedConversations.open(files, "train", "1", length)
    every = np.arange(len(samples))
    padding, counts = samples.padding(every), []
    for first, end in zip(samples.samples, samples.samples[1:], strict=False):
        places = [place for held in samples.lengths[first:end].tolist() for place in range(held)]
        fill = max(0, length - len(places))
        counts.append((places + list(range(fill)))[:length])
        assert padding[len(counts) - 1] == fill
    assert padding.any()
    np.testing.assert_array_equal(samples.positions(every), counts)
    back = every[::-1]
    np.testing.assert_array_equal(samples.positions(back), counts[::-1])
    np.testing.assert_array_equal(samples.padding(back), padding[::-1])


def test_packing_is_tight_and_fits() -> None:
    lengths = np.random.default_rng(0).integers(2, 12, 500)
    bins = pack(lengths, 32)
    filled = np.bincount(bins, lengths)
    assert filled.max() <= 32
    assert len(filled) <= 1.03 * lengths.sum() / 32 + 1
    assert sorted(set(bins.tolist())) == list(range(len(filled)))


def test_long_conversations_are_told(files: TokenFiles) -> None:
    assert (
        "are longer than a sample of 64 tokens: they are cut"
        in PackedConversations.open(files, "train", "1", 64).notes[1]
    )
    assert len(PackedConversations.open(files, "train", "1", 200).notes) == 1


def test_the_cache_belongs_to_rule_and_template(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_chats(tmp_path / "chats.jsonl")
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}")
    plain = JsonLines(lines, tokenizer)
    others = [JsonLines(lines, tokenizer, special_tokens="text"), JsonLines(lines, tokenizer, chat_template=template)]
    first = plain.corpus(64, SILENT)
    assert len(list((tmp_path / "chats.jsonl.cache").glob("*/tokens.bin"))) == 1
    for number, other in enumerate(others, start=2):
        other.corpus(64, SILENT)
        assert len(list((tmp_path / "chats.jsonl.cache").glob("*/tokens.bin"))) == number
    again = JsonLines(lines, tokenizer).corpus(64, SILENT)
    assert again.tokens[: len(again.tokens)].tolist() == first.tokens[: len(first.tokens)].tolist()


def test_pairs_of_texts_count_their_completions(tmp_path: Path, tokenizer: Path) -> None:
    lines = tmp_path / "pairs.jsonl"
    lines.write_text(json.dumps({"prompt": "What is 2 + 2?", "completion": " It is 4."}) + "\n")
    files = prepare((lines,), tmp_path / "tokens", tokenizer=tokenizer)
    decode = files.tokenizer.decode  # type: ignore[union-attr]
    tokens, mask = files.tokens[: len(files.tokens)], files.loss_mask
    assert mask is not None
    learned = tokens[mask[: len(files.tokens)] != 0].tolist()
    assert decode(tokens.tolist(), skip_special_tokens=False).startswith("<|begin_of_text|>What is 2 + 2? It is 4.")
    assert decode(learned, skip_special_tokens=False) == " It is 4.<|end_of_text|>"


@pytest.mark.parametrize("length", [3, 5, 40])
@pytest.mark.parametrize("special_tokens", ["parse", "text"])
def test_no_class_of_samples_counts_the_label_after_a_spelled_end(
    tmp_path: Path, tokenizer: Path, length: int, special_tokens: SpecialTokens
) -> None:
    """In texts, pairs and conversations, prepared or as JSON lines, and in evaluation."""
    end = "<|end_of_text|>"
    eod = load_tokenizer(tokenizer).token_to_id(end)
    turn = (
        {"role": "user", "content": f"How{end}ever?"},
        {"role": "assistant", "content": f"As{end}you{end} like{end}."},
    )
    kinds: dict[str, dict[str, Any]] = {
        "text": {"text": f"What{end} is{end}it?"},
        "pair": {"prompt": f"What{end} is", "completion": f" it{end}?"},
        "chat": {"messages": turn},
    }
    for kind, line in kinds.items():
        path = tmp_path / f"{kind}.jsonl"
        path.write_text(json.dumps(line) + "\n")
        folder = prepare((path,), tmp_path / kind, tokenizer=tokenizer, special_tokens=special_tokens)
        lines = JsonLines(path, tokenizer, special_tokens=special_tokens)
        loader: Any = PackedSamples if kind == "text" else PackedConversations
        both = [loader.open(folder, "train", "1", min(length, len(folder.tokens) - 1))]
        both.append(
            (PaddedSamples if kind == "text" else loader).open(lines.corpus(length, SILENT), "train", "1", length)
        )
        if kind != "text":
            both.append(loader.open(folder, "train", "1", length, counts_all=True))
        spelled = 0
        for samples in both:
            tokens, labels = samples.labelled(np.arange(len(samples)))
            assert (labels[tokens == eod] == -100).all()
            spelled += int(((tokens == eod) & (samples.documents(np.arange(len(samples))) == 0)).any())
            assert (labels != -100).any()
        assert spelled or special_tokens == "text"
        for loss_tokens in ("answers", "all"):
            task = Perplexity(length, length, loss_tokens)
            text = TextEncoder(load_tokenizer(tokenizer), lines.rule)
            documents = DocumentEncoder(text, eod, lines.template)
            work = task.prepare(documents, list(SourceReader(path, "text", lambda _: None)), lambda: None)
            (ids,), masks = work.texts, work.masks or [np.ones(len(work.texts[0]), np.bool_)]
            evaluated = [place for w in work.windows for place in range(w.first, w.end + 1) if masks[0][place]]
            assert evaluated
            assert all(ids[place - 1] != eod for place in evaluated)
            assert sum(work.counted) == len(evaluated)


def test_a_vocabulary_is_not_learned_from_conversations(tmp_path: Path) -> None:
    lines = write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(UserError, match=r"chats.jsonl holds conversations or prompts, .* give the model's"):
        prepare((lines,), tmp_path / "tokens")


def test_lines_of_one_kind(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_chats(tmp_path / "chats.jsonl")
    with lines.open("a") as file:
        file.write('{"text": "plain"}\n')
    with pytest.raises(UserError, match=r"chats.jsonl:5 has no messages and no prompt with a completion"):
        prepare((lines,), tmp_path / "tokens", tokenizer=tokenizer)
    assert not (tmp_path / "tokens").exists()


def test_a_folder_keeps_to_its_rule(files: TokenFiles) -> None:
    config = Config.model_validate({"data": {"path": str(files.path), "special_tokens": "text"}})
    with pytest.raises(UserError, match=r"data.special_tokens is text but .*tokens was made with parse; leave it out"):
        open_dataset(config)


def test_a_mask_is_not_lost_in_a_conversion(files: TokenFiles, tmp_path: Path) -> None:
    from threefold.convert.tokens import convert

    with pytest.raises(UserError, match="holds conversations with a loss mask, which a conversion would lose"):
        convert(files.path, "megatron", tmp_path / "out", None, None, False, Silent())


def test_a_mask_cut_short_is_refused(files: TokenFiles) -> None:
    path = files.path / "loss_mask.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"loss_mask.bin holds .* bytes and .* were written"):
        TokenFiles.open(files.path)
