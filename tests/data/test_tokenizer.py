"""Tokens depend on the text alone, whatever state a tokenizer.json stores and whatever its vocabulary is."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import threefold
from tests.support.other_systems import write_megatron
from threefold.convert.json_lines import JsonLines
from threefold.data.formats.registry import open_corpus
from threefold.data.preparation import prepare
from threefold.data.tokenizer import TextEncoder, TextRule, beginning_of, load_tokenizer
from threefold.errors import UserError
from threefold.output import SILENT

END, BEGIN = 0, 1
TEXTS = ["ACGT", "GATTACA GATTACA TTT", "T"]


def bases(path: Path, template: str = "<s> $A </s>", dropout: float | None = 0.5) -> Path:
    """A vocabulary without ordinary letters, in a file with all the state that a tokenizer.json can store."""
    ids = {"</s>": END, "<s>": BEGIN, **{base: 2 + place for place, base in enumerate("ACGT ")}, "AC": 7, "GT": 8}
    made = Tokenizer(models.BPE(ids, [("A", "C"), ("G", "T")], dropout=dropout, unk_token="</s>"))
    made.normalizer = normalizers.Replace(" ", "")
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>", "<s>"])
    special = [("<s>", BEGIN), ("</s>", END)]
    made.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(template, special_tokens=special)]
    )
    made.enable_padding(length=40, pad_id=END, pad_token="</s>", direction="left")
    made.enable_truncation(3)
    made.save(str(path))
    return path


def theirs(path: Path) -> list[list[int]]:
    import transformers

    read = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bases(path, "<s> $A", dropout=None)))
    return [read(text).input_ids for text in TEXTS]


def test_all_ways_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Which ignores the padding and truncation that it stores; dropout, which it applies, is ignored here."""
    expected = [[*ids, END] for ids in theirs(tmp_path / "theirs.json")]
    assert [ids[0] for ids in expected] == [BEGIN] * 3
    file = bases(tmp_path / "tokenizer.json")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def documents(corpus) -> list[list[int]]:
        return [part.tolist() for part in np.split(corpus.tokens[:], corpus.documents[1:-1])]

    prepared = prepare([texts], tmp_path / "tokens", tokenizer=file)
    assert (documents(prepared), prepared.meta.beginning) == (expected, (BEGIN,))
    lines = JsonLines(texts, file)
    assert (documents(lines.encoded(40, SILENT)), lines.rule.beginning) == (expected, (BEGIN,))
    corpus = open_corpus(write_megatron(tmp_path / "megatron", [[ids] for ids in expected]), tokenizer=file)
    assert (corpus.eod, corpus.rule.beginning) == (END, (BEGIN,))
    loaded = load_tokenizer(file)
    encoder = TextEncoder(loaded, TextRule.of(loaded))
    assert [[*encoder.encode(text), END] for text in TEXTS] == expected


@pytest.mark.parametrize(
    ("template", "beginning"),
    [("$A", ()), ("$A </s>", ()), ("<s> $A", (BEGIN,)), ("<s> </s> $A <s>", (BEGIN, END))],
)
def test_the_post_processor_says_how_texts_begin(tmp_path: Path, template: str, beginning: tuple[int, ...]) -> None:
    """As does encoding each of the vocabulary's own texts."""
    tokenizer = load_tokenizer(bases(tmp_path / "tokenizer.json", template))
    assert beginning_of(tokenizer) == beginning
    for text in TEXTS:
        plain, full = (tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True))
        assert full[: len(beginning) + len(plain)] == [*beginning, *plain]
    tokenizer.post_processor = None
    assert beginning_of(tokenizer) == ()


def test_a_cache_made_without_the_beginning_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions did that lost it where the file stores padding."""
    file, texts = bases(tmp_path / "tokenizer.json"), tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "GATTACA"}) + "\n")
    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "rule", TextRule())
        old = JsonLines(texts, file).encoded(9, SILENT)
    new = JsonLines(texts, file).encoded(9, SILENT)
    assert new.files != old.files
    assert new.tokens[:].tolist() == [BEGIN, *old.tokens[:].tolist()]


def test_tokenizers_come_in_through_one_door(tmp_path: Path) -> None:
    """No other module builds a tokenizer from what is stored, so that none has its state."""
    package = Path(threefold.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("Tokenizer", "AutoTokenizer")
    }
    assert found == {"data/tokenizer.py"}
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(UserError, match=r"--tokenizer .*none\.json is not a tokenizer\.json that can be read"):
        load_tokenizer(tmp_path / "none.json")
