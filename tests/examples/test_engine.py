"""The engine computes a Llama, however its weights are fused, fed or cached."""

import json
import math

import pytest
import torch

import olq
from examples.engine import Llama, LlamaConfig, generate, load_model, perplexity
from examples.engine.generate import choose
from examples.engine.loader import KEEP, load_tokenizer
from oracles import llama as oracle

IDS = [3, 17, 17, 42, 0, 60, 8, 25, 31]


def plain(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Llama:
    model = Llama(LlamaConfig.from_json(config), KEEP)
    model.load_weights(tensors.items())
    return model


@pytest.fixture
def model() -> Llama:
    config = oracle.config_json()
    return plain(config, oracle.checkpoint(config, seed=0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("theta", [500.0, 100000.0])
def test_logits_equal_the_oracle(tied, theta):
    config = oracle.config_json(tied=tied, theta=theta)
    tensors = oracle.checkpoint(config, seed=1)
    with torch.inference_mode():
        got = plain(config, tensors)(torch.tensor([IDS]))[0]
    torch.testing.assert_close(got, oracle.logits(config, tensors, IDS, theta=theta), rtol=1e-4, atol=1e-4)


def test_each_sequence_of_a_batch_stands_alone(model):
    other = IDS[::-1]
    with torch.inference_mode():
        both = model(torch.tensor([IDS, other]))
        alone = model(torch.tensor([other]))
    torch.testing.assert_close(both[1], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[1] * 9, [9], [4, 1, 3, 1], [1, 8]], ids=str)
def test_cached_logits_equal_those_without_a_cache(model, cuts):
    """Also for several tokens on top of cached ones."""
    with torch.inference_mode():
        whole = model(torch.tensor([IDS]))[0]
        cache, pieces = model.new_cache(1, len(IDS)), []
        for piece in torch.tensor(IDS).split(cuts):
            pieces.append(model(piece[None], cache)[0])
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-5, atol=1e-5)


def test_greedy_generation_takes_the_most_likely_token_of_the_whole_sequence(model):
    made = list(generate(model, IDS, max_new_tokens=12))
    ids = list(IDS)
    for token in made:
        with torch.inference_mode():
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    assert len(made) == 12


def test_generation_ends_before_the_end_of_sequence_token(model):
    made = list(generate(model, IDS, max_new_tokens=12))
    config = oracle.config_json(eos_token_id=[made[4], 61])
    stopping = plain(config, oracle.checkpoint(config, seed=0))
    assert list(generate(stopping, IDS, max_new_tokens=12)) == made[: made.index(made[4])]


def test_sampling_repeats_with_its_seed_and_differs_without(model):
    def sample(seed: int) -> list[int]:
        return list(generate(model, IDS, max_new_tokens=20, temperature=2.0, seed=seed))

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_sampling_stays_within_the_top_p_tokens():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return {choose(logits, temperature=1.0, top_p=top_p, generator=generator) for _ in range(200)}

    assert drawn(1e-9) == {1}
    assert drawn(0.39) == {1}
    assert drawn(0.41) == {1, 3}
    assert drawn(0.71) == {1, 2, 3}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_sampled_shares_follow_the_temperature():
    logits = torch.tensor([0.0, math.log(3.0)])
    generator = torch.Generator().manual_seed(0)
    draws = [choose(logits, temperature=0.5, top_p=1.0, generator=generator) for _ in range(2000)]
    assert sum(draws) / 2000 == pytest.approx(0.9, abs=0.03)  # 3 ** (1 / 0.5) to 1


def test_generation_refuses_what_it_can_not_do(model):
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(model, [], max_new_tokens=1))
    with pytest.raises(ValueError, match=r"top_p in \(0, 1\], not 1.0 and 0"):
        next(generate(model, IDS, max_new_tokens=1, temperature=1.0, top_p=0))
    with pytest.raises(ValueError, match="trained for 64 positions, this call reaches 65"):
        list(generate(model, IDS, max_new_tokens=100))


def test_a_fused_weight_is_its_parts_stacked(model):
    tensors = oracle.checkpoint(oracle.config_json(), seed=0)
    parts = [tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(model.model.layers[1].self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(model.model.layers[1].mlp.gate_up_proj.weight, torch.cat(parts))


def test_load_weights_names_every_parameter_it_wrote(model):
    tensors = oracle.checkpoint(oracle.config_json(), seed=0)
    assert model.load_weights(reversed(tensors.items())) == {name for name, _ in model.named_parameters()}


def test_a_tied_model_holds_one_matrix_for_embedding_and_head(model):
    assert model.lm_head is None
    tensors = oracle.checkpoint(oracle.config_json(), seed=0)
    assert model.load_weights([("lm_head.weight", tensors["model.embed_tokens.weight"])]) == {
        "model.embed_tokens.weight"
    }


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.layers.0.self_attn.k_proj.weight",
            (40, 40),
            r"k_proj is \[40, 40\] .* \[16, 40\] in the model",
        ),
        ("model.layers.0.mlp.up_proj.weight", (1, 40), r"up_proj is \[1, 40\] .* \[52, 40\]"),
        ("model.norm.weight", (1,), r"norm is \[1\] .* \[40\]"),
        (
            "model.layers.2.mlp.up_proj.weight",
            (52, 40),
            "no parameter for 'model.layers.2.mlp.up_proj.weight'",
        ),
        (
            "model.layers.0.self_attn.q_proj.bias",
            (48,),
            "no parameter for 'model.layers.0.self_attn.q_proj.bias'",
        ),
    ],
)
def test_load_weights_refuses_by_name(model, name, shape, message):
    with pytest.raises(ValueError, match=message):
        model.load_weights([(name, torch.zeros(shape))])


def test_a_folder_loads_as_its_tensors_do(tmp_path):
    config = oracle.config_json(dtype="bfloat16")
    tensors = oracle.checkpoint(config, seed=3)
    loaded, report = load_model(oracle.save(tmp_path / "a", config, tensors))
    assert isinstance(report, olq.Report)
    expected = plain(config, tensors).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name]), name


def test_config_reads_the_old_and_the_new_spelling_of_the_rotary_base(tmp_path):
    new = oracle.config_json(theta=123.0)
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    (tmp_path / "config.json").write_text(json.dumps(old | {"rope_theta": 123.0, "torch_dtype": "float32"}))
    assert LlamaConfig.from_folder(tmp_path) == LlamaConfig.from_json(new)
    assert LlamaConfig.from_json(new).rope_theta == 123.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ],
)
def test_config_refuses_a_model_that_it_would_compute_wrongly(key, value):
    config = oracle.config_json()
    del config["rope_parameters"]
    with pytest.raises(ValueError, match="this engine needs"):
        LlamaConfig.from_json(config | {key: value})


@pytest.mark.parametrize(("window", "batch"), [(4, 2), (8, 1), (40, 8), (5, 100)])
def test_perplexity_predicts_each_token_once_in_its_window(model, window, batch):
    ids = (IDS * 4)[:33]
    loss = 0.0
    for start in range(0, 32, window):
        piece = ids[start : start + window + 1]
        with torch.inference_mode():
            log_p = model(torch.tensor([piece[:-1]]))[0].double().log_softmax(-1)
        loss -= sum(float(log_p[i, token]) for i, token in enumerate(piece[1:]))
    seen = []
    got = perplexity(
        model, ids, window=window, batch=batch, progress=lambda done, total: seen.append((done, total))
    )
    assert got == pytest.approx(math.exp(loss / 32), rel=1e-5)
    assert seen[-1] == (32, 32)


def test_perplexity_needs_a_token_to_predict(model):
    with pytest.raises(ValueError, match="at least two tokens, the text has 1"):
        perplexity(model, [1])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(raised.value)
