"""Tests of tokenizers that draw at random, leave text out or cannot encode it."""

import json
import string

import pytest
from llama_sources import error_of, load, text_of, write_shard, write_tokens, write_words
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from examples.kit.data import stream as data_stream
from examples.llama import train

LETTERS = string.ascii_lowercase + string.digits


def bpe(path, characters=LETTERS, unk=None, dropout=None, prepare=lambda tokenizer: None):
    """Writes a tokenizer of characters and some pairs of them."""
    pairs = [(left, right) for left in "abdw" for right in "0123456789"]
    vocabulary = ["<eos>", "<unk>", *characters, *(left + right for left, right in pairs)]
    model = models.BPE(
        {token: i for i, token in enumerate(vocabulary)}, pairs, dropout=dropout, unk_token=unk
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    prepare(tokenizer)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def shards(tmp_path):
    write_shard(tmp_path / "a.json.gz", map(text_of, range(100)))
    return tmp_path


def test_a_tokenizer_with_dropout_is_used_without_it(shards, tmp_path):
    random = bpe(tmp_path / "random.json", dropout=0.5)
    tokenizer = Tokenizer.from_file(random)
    assert len({tuple(tokenizer.encode(text_of(0)).ids) for _ in range(9)}) > 1
    plain = load(shards, tokenizer=bpe(tmp_path / "plain.json"))
    loaded = load(shards, tokenizer=random)
    assert "random.json of 78 ids, without its dropout" in loaded.name
    assert loaded.digest == plain.digest
    assert all(loaded.encode(text_of(0)) == plain.encode(text_of(0)) for _ in range(9))
    assert "without" not in plain.name


def test_a_tokenizer_that_samples_is_used_without_that(shards, tmp_path, monkeypatch):
    """The package does not write the sampling of a Unigram model into a file, so far."""
    pieces = [("<unk>", 0.0), ("<eos>", -9.0)] + [(char, -2.0) for char in LETTERS]
    pieces += [(f"w{i}", -3.0) for i in range(10)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "unigram.json"
    tokenizer.save(str(path))
    plain = load(shards, tokenizer=str(path))

    def sampling(content):
        tokenizer = Tokenizer(models.Unigram(pieces, 0, alpha=0.1, nbest_size=9))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return tokenizer

    monkeypatch.setattr(Tokenizer, "from_str", sampling)
    loaded = load(shards, tokenizer=str(path))
    assert "without its alpha, without its nbest_size" in loaded.name
    assert loaded.digest == plain.digest
    assert len({tuple(loaded.encode(text_of(0))) for _ in range(9)}) == 1


def test_padding_truncation_and_markers_do_not_matter(shards, tmp_path):
    def prepare(tokenizer):
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=900)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<eos> $A <eos>", special_tokens=[("<eos>", 0)]
        )

    plain = load(shards, tokenizer=bpe(tmp_path / "plain.json"))
    loaded = load(shards, tokenizer=bpe(tmp_path / "other.json", prepare=prepare))
    assert loaded.encode(text_of(0)) == plain.encode(text_of(0)) and len(plain.encode("a1 b")) == 2


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_characters_that_would_be_dropped_are_named(tmp_path, kind):
    texts = [*map(text_of, range(100)), "and a café"]
    if kind == "text":
        (tmp_path / "a.txt").write_text("\n".join(texts))
    else:
        write_shard(tmp_path / "a.json.gz", texts)
    path = bpe(tmp_path / "tokenizer.json")
    assert f"{path}: has no token for 'é' and none for what it does not know" in error_of(tmp_path)
    # What drops nothing is fine: an unknown token, bytes, a character more, a normalizer.
    bpe(path, unk="<unk>")
    load(tmp_path)
    bpe(path, LETTERS + "é")
    load(tmp_path)
    normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    bpe(path, prepare=lambda tokenizer: setattr(tokenizer, "normalizer", normalizer))
    load(tmp_path)
    both = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("é", "removed")]
    )
    bpe(path, prepare=lambda tokenizer: setattr(tokenizer, "pre_tokenizer", both))
    load(tmp_path)


def test_bytes_of_a_character_are_enough(tmp_path):
    write_shard(tmp_path / "a.json.gz", [*map(text_of, range(100)), "and a café"])
    vocabulary = {"<eos>": 0} | {char: 1 + i for i, char in enumerate(LETTERS)}
    for present in (1, 2):
        codes = {f"<0x{byte:02X}>": 90 + i for i, byte in enumerate("é".encode()[:present])}
        tokenizer = Tokenizer(models.BPE(vocabulary | codes, [], byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        if present == 1:
            assert "has no token for 'é'" in error_of(tmp_path)
    assert load(tmp_path).encode("é") == [90, 91]


def test_a_character_that_the_text_composes_is_known(tmp_path):
    """The accent alone has no token, but nothing of the text is lost."""
    write_shard(tmp_path / "a.json.gz", [*map(text_of, range(100)), "and a cafe\u0301"])
    path = tmp_path / "tokenizer.json"
    bpe(path, LETTERS + "é", prepare=lambda one: setattr(one, "normalizer", normalizers.NFC()))
    load(tmp_path)
    bpe(path, LETTERS + "é")
    assert r"has no token for '\u0301'" in error_of(tmp_path).replace("\u0301", r"\u0301")


@pytest.mark.parametrize("place", [3, 200])
def test_a_text_that_cannot_be_encoded_is_one_line(tmp_path, monkeypatch, place):
    """At once, or where the trouble is deep in a stream, while training."""
    monkeypatch.setattr(data_stream, "_SAMPLE_TOKENS", 1000)
    monkeypatch.setattr(data_stream, "WINDOW", 10)
    texts = ["w2 w3 " * 30] * 400
    texts[place] = "w2 strange"
    write_shard(tmp_path / "a.json.gz", texts)
    write_shard(tmp_path / "validation.json.gz", texts[:2])
    path = write_words(tmp_path / "tokenizer.json", unk="[UNK]")
    if place == 200:
        load(tmp_path)
    message = error_of(tmp_path, batches=400)
    assert message.startswith(f"{path}: cannot encode the text") and "[UNK]" in message


@pytest.mark.parametrize(
    ("charsmap", "expected"),
    [("AAAA", "not a tokenizer.json (Precompiled"), ("A" * 16, "cannot encode the text")],
)
def test_a_panic_of_the_package_is_one_line(shards, charsmap, expected):
    """It is no `Exception`: the first is met at once, the second with the first text."""
    path = write_words(shards / "tokenizer.json")
    settings = json.loads(path.read_text())
    settings["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    path.write_text(json.dumps(settings))
    assert error_of(shards).startswith(f"{path}: {expected}")


def test_a_prompt_that_cannot_be_encoded_is_refused_before_the_first_step(shards, capsys):
    path = write_words(shards / "tokenizer.json", unk="[UNK]")
    write_shard(shards / "a.json.gz", (f"w2 w3 w{i} " * 20 for i in range(2, 100)))
    command = ["--preset", "tiny", "--data", str(shards), "--out", str(shards / "run")]
    assert train.main([*command, "--steps", "1", "--prompt", "strange"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: --prompt 'strange': {path}: cannot encode the text")
    assert not (shards / "run").exists()


def test_of_a_prompt_unknown_characters_may_be_left_out(shards, tmp_path):
    loaded = load(shards, tokenizer=bpe(tmp_path / "tokenizer.json"))
    assert loaded.encode("DéF a1") == loaded.encode("a1") != []


def test_ids_with_holes_are_fine_and_ids_beyond_all_measure_are_not(tmp_path):
    write_shard(tmp_path / "a.json.gz", (f"w2 far w{i} " * 30 for i in range(100)))
    path = write_words(tmp_path / "tokenizer.json", far=70_000)
    loaded = load(tmp_path)
    assert loaded.vocab_size == 70_001 and loaded.encode("w2 far") == [2, 70_000]
    assert any((batch["inputs"] == 70_000).any() for batch in loaded.valid())
    path.write_text(path.read_text().replace("70000", "4000000000"))
    assert f"{path}: ids up to 4,000,000,000 for 301 tokens" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a tokenizer.json"),
        (b"{", "not a tokenizer.json"),
        (b"[]", "not a tokenizer.json"),
        (b"\xff\xfe{\0}\0", "not a tokenizer.json (UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a tokenizer.json (a Git LFS"),
        (b"[" * 100_000, "not a tokenizer.json"),
        (json.dumps({"vocab_size": 3}).encode(), "not a tokenizer.json"),
        (b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0", "not a tokenizer.json"),  # SentencePiece.
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, content, expected):
    write_tokens(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert f"{tmp_path}/tokenizer.json: {expected}" in error_of(tmp_path)


def test_a_tokenizer_without_an_end_of_text_token(tmp_path):
    write_tokens(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<eos>", "<end>"))
    assert f"{path}: no end-of-text token; add one of <|endoftext|>" in error_of(tmp_path)
