"""The answer to a conversation ends at the chat template's end-of-turn token, other text does not."""

from pathlib import Path

import pytest
import torch

from tests.support.chats import TURN_END, write_tokenizer
from tests.support.command import Silent
from threefold.data.conversations import Chat
from threefold.huggingface.import_hf import Import, import_model
from threefold.inference.eval_tasks import Perplexity
from threefold.inference.generate import GenerationRequest, Sampling, encode_prompts, generate_text, generate_tokens
from threefold.inference.model import Trained

REQUEST = GenerationRequest(3, Sampling(temperature=0))
CHAT = Chat("--prompt", ({"role": "user", "content": "What is 2 + 2?"},))


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, int]:
    """A model whose most likely token after `CHAT` is the end of the turn, not its eos token; and that token."""
    import transformers

    folder = tmp_path_factory.mktemp("gemma")
    write_tokenizer(folder / "hf", "gemma")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    ).eval()
    ids = tokenizer.apply_chat_template(
        list(CHAT.messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    end = tokenizer.convert_tokens_to_ids(TURN_END["gemma"])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, -1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[end] = hidden
    model.save_pretrained(folder / "hf")
    import_model(Import(folder / "hf", folder / "run"), Silent())
    return Trained.find(Path(folder / "run")), end


def test_an_answer_ends_with_the_turn(answering: tuple[Trained, int]) -> None:
    trained, end = answering
    assert end not in trained.ends()  # eos is another token
    [begun], ends = encode_prompts(trained, [CHAT], REQUEST)
    assert ends == trained.ends() | {end}
    model = trained.load(dtype="fp64")
    assert next(generate_tokens(model, [begun], REQUEST))[1] == end
    assert [token for _, token in generate_tokens(model, [begun], REQUEST, ends)] == [None]
    assert list(generate_text(model, [CHAT], REQUEST)) == [(0, None)]


def test_text_does_not_end_with_a_turn(answering: tuple[Trained, int]) -> None:
    trained, end = answering
    _, ends = encode_prompts(trained, ["What is 2 + 2?"], REQUEST)
    assert ends == trained.ends()
    assert end not in ends


def test_answers_alone_are_evaluated_unless_all_tokens_are(answering: tuple[Trained, int]) -> None:
    trained, _ = answering
    chat = Chat("--data:1", (*CHAT.messages, {"role": "assistant", "content": "4"}))
    documents = trained.documents()
    ids, answers = documents.encode(chat)
    for tokens, expected in (("answers", sum(answers)), ("all", len(ids) - 1)):
        prepared = Perplexity(64, 64, tokens).prepare(documents, [chat], lambda: None)
        assert sum(prepared.counted) == expected
    assert 0 < sum(answers) < len(ids) - 1
