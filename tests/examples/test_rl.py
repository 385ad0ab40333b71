"""The RL example: rewards and formulas are right, and each step leaves the engine with the trainer's weights."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="needs the demo's packages: matplotlib, tokenizers, tqdm")
pytest.importorskip("tokenizers", reason="needs the demo's packages: matplotlib, tokenizers, tqdm")
pytest.importorskip("tqdm", reason="needs the demo's packages: matplotlib, tokenizers, tqdm")

import olq
from examples.engine import Llama
from examples.rl import task
from examples.rl.__main__ import CHECKPOINT, main
from examples.rl.grpo import advantages, importance, kl, policy_loss, token_mean
from examples.rl.loop import Loop
from examples.rl.trainer import Settings, logprobs


@pytest.fixture
def rewards_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each step learns something: the start is rewarded for one continuation in a hundred."""
    monkeypatch.setattr(task, "reward", lambda text: len(text) % 3 / 2)


def short(method: str, settings: Settings | None = None, seed: int = 0) -> Loop:
    return Loop(CHECKPOINT, method, settings or Settings(), prompts=4, group=4, new_tokens=12, seed=seed)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("def load(path: str) -> bytes:\n    return", 1.0),
        ("def load(self, path: str) -> bytes:\n", 1.0),
        ("def load(a: int, /, b: str = '', *, c: x[y]) -> None:\n", 1.0),
        ("def load(path: str):\n", 1 / 2),
        ("def load(path, mode: str):\n", 1 / 3),
        ("def load(path, mode) -> None:\n", 1 / 3),
        ("def load(path):\n", 0.0),
        ("def load(self) -> None:\n", 0.0),  # nothing to annotate
        ("def load() -> None:\n", 0.0),
        ("def load(path: str) -> bytes:", 0.0),  # did not end in time
        ("def load(path: str -> bytes:\n", 0.0),
        ("def load(path: str) -> bytes: return\n", 0.0),  # more than a header
        ("def load(path: str) -> bytes:\n)", 1.0),  # only the first line counts
        ("def load(\n    path: str) -> bytes:\n", 0.0),
        ("def load(\0: str) -> bytes:\n", 0.0),
        ("if path:\n", 0.0),
    ],
)
def test_the_reward_is_the_share_of_a_header_that_has_types(text, reward):
    assert task.reward(text) == pytest.approx(reward)


@given(st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(twelfths):
    rewards_PG = torch.tensor(twelfths) / 12
    found_PG = advantages(rewards_PG)
    torch.testing.assert_close(found_PG.sum(1), torch.zeros(len(twelfths)), rtol=0, atol=1e-5)
    order = rewards_PG.argsort(dim=1)
    assert (found_PG.gather(1, order).diff(dim=1) >= 0).all()


def test_a_group_of_equal_rewards_teaches_nothing():
    assert advantages(torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 1.0]]))[0].tolist() == [0.0, 0.0, 0.0]


def test_the_kl_estimate_is_exact_in_expectation_and_never_negative():
    p, q = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    each = kl(p, q)
    assert (each >= 0).all()
    torch.testing.assert_close((p.exp() * each).sum(), (p.exp() * (p - q)).sum())


def test_importance_weights_turn_averages_over_the_rollout_policy_into_the_trainers_until_they_are_cut():
    rollout, trainer = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    values = torch.arange(9.0)
    weights = importance(trainer, rollout, cap=float("inf"))
    torch.testing.assert_close((rollout.exp() * weights * values).sum(), (trainer.exp() * values).sum())
    assert importance(trainer, rollout, cap=1.5).max() == 1.5 < weights.max()


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"), [(1, 1, -1), (1, -2, 2), (1.3, 1, 0), (0.7, -1, 0), (1.3, -1, 1.3)]
)
def test_the_clipped_loss_pushes_only_where_the_ratio_has_not_gone_far_enough(ratio, advantage, slope):
    new = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    weight = torch.tensor([[0.5]])
    policy_loss(new, torch.zeros(1, 1), weight, torch.tensor([advantage]), clip=0.2).sum().backward()
    assert new.grad.item() == pytest.approx(0.5 * slope)


@pytest.mark.parametrize("method", ["fp8", "nvfp4"])
def test_a_step_leaves_the_engine_with_the_bytes_of_a_fresh_load_at_the_old_addresses(method, rewards_differ):
    loop = short(method)
    before = dict(loop.trainer.weights())
    step = loop.step()
    assert loop.moved() == []
    assert step.generation == 2
    assert any(not torch.equal(t, before[name]) for name, t in loop.trainer.weights())
    fresh = Llama(loop.engine.model.config, olq.QuantConfig(method=method))
    olq.load(fresh, loop.trainer.weights())
    expected = dict(fresh.named_parameters())
    for name, got in loop.engine.model.named_parameters():
        assert torch.equal(
            got.contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8)
        ), name


def test_a_tensor_that_moved_is_named():
    loop = short("fp8")
    norm = loop.engine.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
    assert loop.moved() == ["model.norm.weight"]


def test_the_gap_is_that_of_quantization_and_not_of_the_two_implementations(rewards_differ):
    """After a reload too: an engine that kept old weights would show it here."""
    kls = {}
    for method in ("keep", "fp8", "nvfp4"):
        loop = short(method, Settings(rate=1e-3))
        loop.step()
        kls[method] = loop.step().update.kl
    assert 0 <= kls["keep"] < 1e-3
    assert 3 * kls["keep"] < kls["fp8"]
    assert 3 * kls["fp8"] < kls["nvfp4"]
    assert kls["nvfp4"] > 0.01


def test_tokens_after_the_end_do_not_count():
    loop = short("keep")
    rollout = loop.engine.sample(
        loop.prompts_NL, loop.ends_V, new_tokens=12, generator=torch.Generator().manual_seed(0)
    )
    for ids, mask in zip(rollout.ids_BS[:, loop.prompts_NL.shape[1] :], rollout.mask_BT, strict=True):
        ended = loop.ends_V[ids].nonzero().flatten().tolist()
        assert mask.sum() == (ended[0] + 1 if ended else 12)
    assert not rollout.mask_BT.all()


def test_an_update_makes_what_was_rewarded_more_likely():
    loop = short("nvfp4", Settings(epochs=2, beta=0.01))
    rollout = loop.engine.sample(
        loop.prompts_NL[:8], loop.ends_V, new_tokens=12, generator=torch.Generator().manual_seed(0)
    )
    wanted_B = torch.tensor([1.0, -1.0]).repeat(4)

    def score() -> float:
        with torch.no_grad():
            return token_mean(
                logprobs(loop.trainer.model, rollout) * wanted_B[:, None], rollout.mask_BT
            ).item()

    before = score()
    loop.trainer.update(rollout, wanted_B)
    assert score() > before


def test_the_penalty_pulls_the_policy_back_to_where_it_started():
    loop = short("keep", Settings(beta=1.0, rate=2e-6))
    rollout = loop.engine.sample(
        loop.prompts_NL[:4], loop.ends_V, new_tokens=12, generator=torch.Generator().manual_seed(0)
    )

    def distance() -> float:
        with torch.no_grad():
            now, start = (logprobs(model, rollout) for model in (loop.trainer.model, loop.trainer.reference))
            return token_mean(kl(now, start), rollout.mask_BT).item()

    assert distance() == 0.0
    with torch.no_grad():
        loop.trainer.model.model.norm.weight.mul_(1.3)
    before = distance()
    loop.trainer.update(rollout, torch.zeros(4))
    assert 0.0 < distance() < before


def test_equal_seeds_give_equal_steps(rewards_differ):
    steps = [short("fp8", seed=seed).step() for seed in (3, 3, 4)]
    told = [(step.reward, step.update, step.sample) for step in steps]
    assert told[0] == told[1] != told[2]


def test_the_program_prints_each_step_and_draws_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sizes = ["--prompts", "2", "--group", "4", "--new-tokens", "8"]
    main(["--method", "fp8", "nvfp4", "--steps", "2", "--out", str(tmp_path), *sizes])
    text = capsys.readouterr().out
    for method in ("fp8", "nvfp4"):
        assert re.search(rf"^{method}: addresses changed: 0 of \d\d tensors$", text, re.MULTILINE), text
    assert len(re.findall(r"^ +[12] +0\.\d{3} ", text, re.MULTILINE)) == 4, text
    assert (tmp_path / "rl.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["fp8", "nvfp4"])
def test_the_reward_rises(method):
    loop = Loop(CHECKPOINT, method, Settings())
    rewards = [loop.step().reward for _ in range(40)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
