"""The last id of a vocabulary, read out of files that the tokenizers library writes."""

import pytest
from tokenizers import Tokenizer, models, normalizers, trainers

from dsft.errors import DsftError
from dsft.plan.tokenizer import last_id

TEXT = ["merges and more, merges", '{"merges": [1], "id": 999999}', '}, "merges": [']


def byte_pairs(size: int, *added: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=size))
    tokenizer.add_special_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize("added", [(), ("<one>", '"id": 7777'), ("<one>", "<two>")])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_last_id(tmp_path, pretty, added, normalizer):
    tokenizer = byte_pairs(60, *added)
    tokenizer.normalizer = normalizer or tokenizer.normalizer
    tokenizer.save(str(tmp_path / "tokenizer.json"), pretty=pretty)
    assert last_id(tmp_path) == tokenizer.get_vocab_size(with_added_tokens=False) - 1


def test_an_added_token_in_the_vocabulary_is_not_judged(tmp_path):
    tokenizer = byte_pairs(60)
    last = tokenizer.id_to_token(tokenizer.get_vocab_size() - 1)
    tokenizer.add_special_tokens([last])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert last_id(tmp_path) is None


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"model": {"vocab": {}, "merges": []}}', b"\xff"])
def test_what_is_no_such_file(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    assert last_id(tmp_path) is None


def test_another_kind_of_vocabulary(tmp_path):
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert last_id(tmp_path) is None


@pytest.mark.parametrize("lacking", [0, 1])
def test_the_tokenizer_of_another_model(workshop, lacking):
    tokenizer = byte_pairs(60)
    size = tokenizer.get_vocab_size()
    tokenizer.save(str(workshop.model(vocab_size=size - lacking) / "tokenizer.json"))
    if not lacking:
        assert workshop.warnings() == []
        return
    with pytest.raises(DsftError, match=f"ids up to {size - 1}, and the model embeddings for {size - 1}") as caught:
        workshop.plan()
    assert [problem.kind for problem in caught.value.problems] == ["tokenizer-mismatch"]
