"""Generation against slow, obvious references, and the command as a user meets it."""

import argparse
import math
import random

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models
from torch import nn

from tests.conftest import VOCABULARY
from tst_lightning import PhaseSchedule, Transformer, TransformerConfig, UserError, fold, generate
from tst_lightning.checkpoints import RECORD
from tst_lightning.generation import command, sampling
from tst_lightning.generation.decoding import decode_stream
from tst_lightning.generation.sampling import nucleus

V = 31


def tiny(vocab_size=V, **changes):
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,  # so that the next token depends on all before it
    }
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**{**shape, **changes}))


class Fixed(nn.Module):
    """The same logits (V,) everywhere; no parameters, no config and no cache."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, bags):
        return self.logits.expand(*bags.shape[:2], -1)


def greedy(network, tokens_BL, count):
    """The definition."""
    for _ in range(count):
        logits = network(fold(tokens_BL, 1))[:, -1]
        tokens_BL = torch.cat((tokens_BL, logits.argmax(-1, keepdim=True)), 1)
    return tokens_BL[:, -count:]


# ---------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 2}, {"tie_word_embeddings": True, "num_key_value_heads": 1}],
    ids=["full", "grouped", "tied"],
)
def test_greedy_with_the_cache_without_it_and_by_definition(changes, dtype, monkeypatch):
    monkeypatch.setattr(sampling, "PREFILL", 4)  # prompts of one, several and unequal parts
    network = tiny(**changes).to(dtype)
    seen = set()
    for length, count in [(1, 40), (4, 12), (9, 20)]:
        prompts = torch.randint(V, (3, length))
        expected = greedy(network, prompts, count)
        for use_cache in (True, False):
            batch = torch.stack([*generate(network, prompts, count, temperature=0, use_cache=use_cache)], 1)
            assert torch.equal(batch, expected)
            for prompt, row in zip(prompts, expected, strict=True):
                alone = [*generate(network, prompt.to(torch.uint16), count, temperature=0, use_cache=use_cache)]
                assert all(token.shape == () for token in alone)
                assert torch.equal(torch.stack(alone), row)
        seen |= set(expected.flatten().tolist())
    assert len(seen) > 5, "hardly a test"


def test_the_cache_saves_reading():
    network, read = tiny(), []
    network.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].shape[1]))
    assert len([*generate(network, torch.arange(7), 5)]) == 5
    assert read == [7, 1, 1, 1, 1]
    read.clear()
    assert len([*generate(network, torch.arange(7), 5, use_cache=False)]) == 5
    assert read == [7, 8, 9, 10, 11]


def test_any_network_that_gives_logits():
    logits = torch.zeros(6)
    logits[4] = 1
    assert [int(token) for token in generate(Fixed(logits), torch.tensor([0]), 3, temperature=0)] == [4, 4, 4]


# ---------------------------------------------------------------------------- sampling


def nucleus_by_hand(logits, temperature, top_p):
    weights = [math.exp(logit / temperature) for logit in logits]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    kept, total = set(), 0.0
    for token in sorted(range(len(logits)), key=lambda token: -probabilities[token]):
        if total >= top_p:
            break
        kept.add(token)
        total += probabilities[token]
    return [p / total if token in kept else 0.0 for token, p in enumerate(probabilities)]


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_nucleus_against_the_definition(temperature, top_p):
    logits = torch.randn(20, V, dtype=torch.float64) * 2
    actual = nucleus(logits, temperature=temperature, top_p=top_p)
    expected = torch.tensor([nucleus_by_hand(row.tolist(), temperature, top_p) for row in logits], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_nucleus_reaches_top_p_and_no_further():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in [(0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.88, 4), (1, 4)]:
        assert int((nucleus(logits, temperature=1.0, top_p=top_p) > 0).sum()) == kept, top_p


def test_low_precision_logits_are_drawn_from_in_fp64():
    logits = torch.randn(3, 1000).bfloat16()
    probabilities = nucleus(logits, temperature=0.7, top_p=0.9)
    assert torch.equal(probabilities, nucleus(logits.double(), temperature=0.7, top_p=0.9))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-300, 1.0), (5e-324, 0.9), (1.0, 1e-300), (1e-46, 1e-46)])
def test_however_small_a_temperature_or_a_share_leaves_the_likeliest(temperature, top_p):
    logits = torch.randn(3, 1000)
    probabilities = nucleus(logits, temperature=temperature, top_p=top_p)
    assert torch.equal(probabilities, torch.nn.functional.one_hot(logits.argmax(-1), 1000).double())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.4)])
def test_frequencies(temperature, top_p):
    logits, draws = torch.randn(12, generator=torch.Generator().manual_seed(0)), 40_000
    drawn = next(
        generate(
            Fixed(logits), torch.zeros(draws, 1, dtype=torch.long), 1,
            temperature=temperature, top_p=top_p, generator=torch.Generator().manual_seed(1),
        )
    )  # fmt: skip
    for token, p in enumerate(nucleus_by_hand(logits.tolist(), temperature, top_p)):
        sigma = math.sqrt(p * (1 - p) / draws)
        assert abs((drawn == token).float().mean().item() - p) <= 4.5 * sigma, token  # exactly 0 outside the nucleus


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"temperature": 1e-30}], ids=str)
def test_what_leaves_one_token_is_greedy(options):
    network, prompts = tiny(), torch.randint(V, (4, 5))
    tokens = torch.stack([*generate(network, prompts, 10, **options)], 1)
    assert torch.equal(tokens, greedy(network, prompts, 10))


def test_a_seed_fixes_the_text_and_the_callers_random_state_is_left_alone():
    network, before = tiny(), torch.get_rng_state()

    def text(seed):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return [int(token) for token in generate(network, torch.tensor([1]), 20, generator=generator)]

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert text(None) != text(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_ends_at_the_stop_id_and_a_batch_with_its_last_text():
    script = torch.tensor([[1, 2, 9, 4, 5], [9, 2, 3, 4, 5], [1, 2, 3, 9, 5]])

    class Scripted(nn.Module):
        def forward(self, bags):
            return nn.functional.one_hot(script[:, bags.shape[1] - 1], 10).double().unsqueeze(1)

    tokens = [*generate(Scripted(), torch.zeros(3, 1, dtype=torch.long), 5, temperature=0, stop_id=9)]
    assert torch.stack(tokens, 1).tolist() == [[1, 2, 9, 9], [9, 9, 9, 9], [1, 2, 3, 9]]


def test_the_callers_modes_are_his_own_between_tokens():
    class Modes(Fixed):
        def __init__(self):
            super().__init__(torch.zeros(5))
            self.frozen, self.free = nn.Dropout(), nn.Dropout()
            self.frozen.eval()

        def forward(self, bags):
            assert not self.training and not self.free.training and not torch.is_grad_enabled()
            return super().forward(bags)

    network = Modes()
    for token in generate(network, torch.tensor([0]), 3):
        assert network.training and network.free.training and not network.frozen.training
        assert torch.is_grad_enabled() and not token.requires_grad


def test_faults_come_all_at_once_and_before_the_first_token():
    with pytest.raises(UserError) as error:
        generate(tiny(), torch.tensor([V]), 0, temperature=math.nan, top_p=1.5)
    assert [fault.split()[0] for fault in error.value.faults] == [
        "max_new_tokens=0", "temperature=nan", "top_p=1.5", "the",
    ]  # fmt: skip
    assert f"the id {V}, but the network has vocab_size={V}" in error.value.faults[3]
    for prompt, fault in [
        (torch.zeros(2, 0, dtype=torch.long), "empty"),
        (torch.zeros(3), "torch.float32"),
        (torch.zeros(1, 1, 1, dtype=torch.long), r"shape \(1, 1, 1\)"),
        (torch.tensor([-1]), "the id -1"),
    ]:
        with pytest.raises(UserError, match=fault):
            generate(Fixed(torch.zeros(5)), prompt, 1)
    for options in ({"temperature": -1.0}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": math.nan}):
        with pytest.raises(UserError, match=next(iter(options))):
            generate(tiny(), torch.tensor([1]), 1, **options)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_network_that_has_diverged_says_so(temperature):
    with pytest.raises(FloatingPointError, match="diverged"):
        next(generate(Fixed(torch.tensor([1.0, math.nan])), torch.tensor([0]), 1, temperature=temperature))


# ---------------------------------------------------------------------------- ids to text


@pytest.fixture(scope="module")
def tokenizer(text_corpus):
    return Tokenizer.from_file(str(text_corpus.tokenizer_path))


def test_characters_that_several_tokens_make_come_whole(tokenizer):
    text = "naïve 中文, \U0001f600!\n\tend"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text), "no character is split"
    for cut in range(len(ids)):
        prompt = tokenizer.decode(ids[:cut]).rstrip("�")
        pieces = [*decode_stream(tokenizer, ids[:cut], iter(ids[cut:]), end_id=0)]
        assert prompt + "".join(pieces) == text
        assert "�" not in "".join(pieces)
    assert len(pieces := [*decode_stream(tokenizer, [], ids, end_id=0)]) > 10, pieces  # as they come
    assert "".join(decode_stream(tokenizer, [0], [*ids[:3], 0, *ids], end_id=0)) == "na"  # and half of a letter


def test_words_keep_their_spaces_and_bytes_that_are_no_text_end_nothing():
    """As SentencePiece has it: a space belongs to the word after it, and the first one of a text is dropped."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}, "▁the": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert "".join(decode_stream(tokenizer, [258], [258, 258], end_id=1)) == " the the"
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.choice([rng.randrange(2, 258), 258, 259]) for _ in range(30)]
        text = "".join(decode_stream(tokenizer, ids[:10], ids[10:], end_id=1))
        assert text.count("the") >= ids[10:].count(258) - 1


# ---------------------------------------------------------------------------- the command

L = 32


def save(path, network, corpus, *, step=24, shape=None, **changes):
    """A checkpoint as a run saves it, of as much as is read."""
    record = {
        "schedule": PhaseSchedule.from_ratio(4, 0.5, 24).to_dict(),
        "network": network.config.to_dict() if shape is None else shape,
        "data": {"latent_length": L, "tokenizer_sha256": corpus.tokenizer_sha256},
        "step": step,
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({RECORD: record, "state_dict": {f"network.{k}": v for k, v in network.state_dict().items()}}, path)


@pytest.fixture
def run(text_corpus, tmp_path):
    """A run's directory with two checkpoints."""
    save(tmp_path / "run/checkpoints/step-000000012.ckpt", tiny(VOCABULARY), text_corpus, step=12)
    save(tmp_path / "run/checkpoints/step-000000024.ckpt", tiny(VOCABULARY, rope_theta=77.0), text_corpus)
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({"data": {"path": str(text_corpus.directory)}}))
    return tmp_path / "run"


@pytest.fixture
def call(capsys):
    def call(*arguments):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        assert command.run(parser.parse_args([str(argument) for argument in arguments])) == 0
        return capsys.readouterr()

    return call


def continuation(network, tokenizer, prompt, count):
    ids = [0, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    new = greedy(network, torch.tensor([ids]), count or L - len(ids))[0].tolist()
    text = tokenizer.decode(ids[1:] + (new[: new.index(0)] if 0 in new else new), skip_special_tokens=False)
    return text.rstrip("�") + "\n"


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_the_text_goes_on_from_the_prompt_to_the_end_of_the_window(tie, run, call, tokenizer, text_corpus):
    network = tiny(VOCABULARY, rope_theta=77.0, tie_word_embeddings=tie)
    save(run / "checkpoints/step-000000024.ckpt", network, text_corpus)
    for arguments, prompt, count in [([], "", None), (["--prompt", "def é("], "def é(", None),
                                     (["--max-new-tokens", 3], "", 3)]:  # fmt: skip
        output, notes = call(run, "--temperature", 0, *arguments)
        assert output == continuation(network, tokenizer, prompt, count)
        assert output.startswith(prompt)
        assert notes == f"note: {run}/checkpoints/step-000000024.ckpt: step 24 of 24\n"


def test_an_earlier_checkpoint_inside_the_superposition_phase(run, call, tokenizer):
    for place in (run / "checkpoints/step-000000012.ckpt", None):
        if place is None:
            (run / "checkpoints/step-000000024.ckpt").unlink()
        output, notes = call(place or run / "checkpoints", "--temperature", 0)
        assert output == continuation(tiny(VOCABULARY), tokenizer, "", None)
        assert "step 12 of 24" in notes and "trained on bags only, of 4 last" in notes and "recovery" in notes


def test_the_draws_are_those_of_the_seed(run, call):
    first, again, other = (call(run, "--seed", seed).out for seed in (0, 0, 1))
    assert first == again != other
    assert call(run).out == first != call(run, "--temperature", 2).out


def test_the_end_of_a_document_ends_the_text(run, call, text_corpus):
    network = tiny(VOCABULARY)
    with torch.no_grad():  # only the end-of-text token's logit is positive
        for name, weight in network.named_parameters():
            weight.fill_(0.0 if "o_proj" in name or "down_proj" in name else 1.0)
        network.lm_head.weight[1:] = -1
    save(run / "checkpoints/step-000000024.ckpt", network, text_corpus)
    assert call(run, "--prompt", "def f").out == "def f\n"


def test_beyond_the_window_there_is_a_word_of_it(run, call):
    assert "go beyond" not in call(run, "--max-new-tokens", L - 1).err
    assert f"note: {L + 1} tokens go beyond the windows of {L}" in call(run, "--max-new-tokens", L).err


def test_the_tokenizer_is_found_or_asked_for(run, call, text_corpus, tmp_path, monkeypatch):
    expected = call(run).out
    named = ["--tokenizer", text_corpus.tokenizer_path]
    config = run / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"path": text_corpus.directory.name}}))
    with pytest.raises(UserError, match=r"counts from the folder in which fit was run\): name .* by --tokenizer"):
        call(run)
    monkeypatch.chdir(text_corpus.directory.parent)
    assert call(run).out == expected
    monkeypatch.chdir(tmp_path)
    assert call(run, *named).out == expected
    for text in ("data: {}", "data: [", "- 1"):
        config.write_text(text)
        with pytest.raises(UserError, match=r"names no corpus in data\.path"):
            call(run)
    config.unlink()
    with pytest.raises(UserError, match=r"no config\.yaml of a run beside"):
        call(run)
    assert call(run, *named).out == expected
    (tmp_path / "other.json").write_bytes(text_corpus.tokenizer_path.read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"other.json is not the tokenizer .*--tokenizer"):
        call(run, "--tokenizer", tmp_path / "other.json")


def test_what_ends_a_document_is_what_the_corpus_said(run, call, text_corpus):
    path, arguments = run / "checkpoints/step-000000024.ckpt", (run, "--temperature", 0)
    expected = call(*arguments).out
    checkpoint = torch.load(path, weights_only=True)
    assert "e" in expected
    checkpoint[RECORD]["data"]["end_of_text"] = "e"
    torch.save(checkpoint, path)
    text = call(*arguments).out
    assert text != expected and "e" not in text
    checkpoint[RECORD]["data"]["end_of_text"] = "no such token"
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match="no such token"):
        call(*arguments)


def test_a_checkpoint_that_says_nothing_of_its_data(run, call, text_corpus):
    save(run / "checkpoints/step-000000024.ckpt", tiny(VOCABULARY), text_corpus, data={})
    output = call(run, "--max-new-tokens", 2)
    assert "does not say which tokenizer" in output.err


def test_mistakes_come_all_at_once(run, call, tmp_path):
    with pytest.raises(UserError) as error:
        call(
            tmp_path / "nowhere", "--temperature=-1", "--top-p=0", "--max-new-tokens=0", "--seed=-1", "--device=abacus",
            "--tokenizer=missing.json",
        )  # fmt: skip
    found = "\n".join(error.value.faults)
    for fault in ("max_new_tokens=0", "temperature=-1.0", "top_p=0.0", "seed=-1", "--device abacus", "nowhere: there",
                  "--tokenizer missing.json"):  # fmt: skip
        assert fault in found, found
    assert len(error.value.faults) == 7


def test_what_is_no_checkpoint_to_generate_from(run, call, tmp_path, text_corpus):
    file = tmp_path / "file.ckpt"

    def refused(*arguments):
        with pytest.raises(UserError) as error:
            call(*arguments)
        assert "\n" not in error.value.faults[0]
        return error.value.faults[0]

    file.write_bytes((run / "checkpoints/step-000000024.ckpt").read_bytes()[:1000])
    assert "file.ckpt is not a whole checkpoint" in refused(file)
    file.write_text("text")
    assert "file.ckpt is not a whole checkpoint" in refused(file)
    torch.save({"state_dict": {}}, file)
    assert "not saved by a TST run" in refused(file)
    torch.save({RECORD: {"step": 3}}, file)
    assert "is damaged" in refused(file)
    assert "has no checkpoint" in refused(tmp_path)
    (tmp_path / "run/checkpoints/step-000000030.ckpt").mkdir()
    assert "sharded checkpoint" in refused(run)
    assert "sharded checkpoint" in refused(run / "checkpoints/step-000000030.ckpt")

    inside = run / "checkpoints/other.ckpt"
    for shape in ({}, {"model_type": "other"}, tiny(VOCABULARY, num_hidden_layers=3).config.to_dict()):
        save(inside, tiny(VOCABULARY), text_corpus, shape=shape)
        assert "tst_lightning.generate(network, ...)" in refused(inside)


def test_prompts_that_cannot_be(run, call):
    with pytest.raises(UserError, match=f"windows of {L}: shorten it, or go beyond them by --max-new-tokens"):
        call(run, "--prompt", "x y " * L)
    assert "beyond the windows" in call(run, "--prompt", "x y " * L, "--max-new-tokens", 1).err
    with pytest.raises(UserError, match="not text that the tokenizer can read"):
        call(run, "--prompt", "\udce9")


def test_a_run_that_has_diverged(run, call, text_corpus, capsys):
    network = tiny(VOCABULARY)
    nn.init.constant_(network.model.norm.weight, math.nan)
    save(run / "checkpoints/step-000000024.ckpt", network, text_corpus)
    with pytest.raises(UserError, match=r"diverged: take an earlier checkpoint"):
        call(run)


def test_ctrl_c_leaves_the_line_whole(run, call, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        yield torch.tensor(70)
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(run, "--prompt", "abc")
    output = capsys.readouterr().out
    assert output.startswith("abc") and len(output) == 5 and output.endswith("\n")
