"""The loop: it learns, goes on after an interruption as if there had been none, and refuses to go astray."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.models.config import Layer
from forerun.models.transformer import Transformer
from forerun.train.checkpoint import read_checkpoint
from forerun.train.loop import Loop, LoopOptions, News, Standing
from forerun.train.loss import Loss
from forerun.train.methods.draft import Distil
from forerun.train.optimizers import OPTIMIZERS, Optimizer, optimizers
from forerun.train.processes import Processes
from forerun.train.texts import Text, TextBatch
from tests.models.rows import VOCABULARY, config, tiny

TARGET = config(2, 1, 16, hidden=32, layers=(Layer(), Layer()))
STUDENT = replace(TARGET, layers=(Layer(),))
OPTIONS = LoopOptions(steps=12, batch=4, learning_rate=3e-3, every=4)


def some_texts() -> list[Text]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (10, 24), generator=generator).tolist()
    return [Text.of(row[:4], row[4 : 12 + index]) for index, row in enumerate(rows)]


def student() -> Transformer:
    return tiny(STUDENT, seed=1, dtype=torch.float32).requires_grad_(True)


def distil() -> Distil:
    return Distil(student(), tiny(TARGET, dtype=torch.float32))


def rising() -> Callable[[], float]:
    values = iter(range(1000))
    return lambda: float(next(values))


class Faulty:
    """Distillation whose loss is spoiled after so many steps."""

    def __init__(self, factor: float, after: int) -> None:
        self.sound = distil()
        self.module = self.sound.module
        self.factor, self.after = factor, after

    def loss(self, batch: TextBatch) -> Loss:
        loss = self.sound.loss(batch)
        self.after -= 1
        return loss if self.after >= 0 else Loss(loss.total * self.factor, loss.count, loss.figures)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_learns(tmp_path: Path, optimizer: Optimizer) -> None:
    options = replace(OPTIONS, steps=80, every=20, optimizer=optimizer)
    standing = Loop(distil(), some_texts(), options, rising(), tmp_path / "c.pt").run()
    rows = standing.history
    assert [row["step"] for row in rows] == [0, 20, 40, 60, 80]
    assert rows[4]["loss"] < 0.5 * rows[1]["loss"]
    assert rows[4]["agreement"] > rows[1]["agreement"] + 0.2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_goes_on_as_if_nothing_had_happened(tmp_path: Path, optimizer: Optimizer) -> None:
    options = replace(OPTIONS, optimizer=optimizer)

    def interrupt(news: News) -> None:
        if news.step == 10:
            raise KeyboardInterrupt

    def measure() -> float:
        return torch.rand(()).item()

    whole, torn, again = distil(), distil(), distil()
    torch.manual_seed(0)
    standing = Loop(whole, some_texts(), options, measure, tmp_path / "a.pt").run()
    torch.manual_seed(0)
    place = tmp_path / "b.pt"
    with pytest.raises(KeyboardInterrupt):
        Loop(torn, some_texts(), options, measure, place, tell=interrupt).run()
    loop = Loop(again, some_texts(), options, measure, place)
    torch.manual_seed(7)
    loop.resume()
    assert loop.standing.step == 8
    assert loop.run() == standing
    for name, weight in whole.module.state_dict().items():
        assert torch.equal(weight, again.module.state_dict()[name])
    first, second = (read_checkpoint(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert {**first["standing"], "seconds": 0} == {**second["standing"], "seconds": 0}
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])


@pytest.mark.parametrize(("factor", "what"), [(math.nan, "loss is nan"), (math.inf, "loss is inf"), (1e4, "loss is ")])
def test_a_loss_gone_astray_is_refused(tmp_path: Path, factor: float, what: str) -> None:
    place = tmp_path / "c.pt"
    loop = Loop(Faulty(factor, after=6), some_texts(), OPTIONS, rising(), place)
    with pytest.raises(ValueError, match=rf"{what}.* at step 7.*lower --learning-rate.*from step 4 with --resume"):
        loop.run()
    kept = read_checkpoint(place)
    assert kept["standing"]["step"] == 4
    assert all(bool(weight.isfinite().all()) for weight in kept["weights"].values())


def test_it_ends_when_nothing_gets_better_and_keeps_the_best(tmp_path: Path) -> None:
    values = iter([1.0, 2.0, 1.5, 2.0, 1.9])
    method = distil()
    seen: dict[int, torch.Tensor] = {}

    def measure() -> float:
        seen[len(seen)] = method.module.get_parameter("model.norm.weight").detach().clone()
        return next(values)

    options = replace(OPTIONS, steps=100, patience=3)
    standing = Loop(method, some_texts(), options, measure, tmp_path / "c.pt").run()
    assert (standing.step, standing.best, standing.best_step) == (16, 2.0, 12)
    assert torch.equal(method.module.get_parameter("model.norm.weight"), seen[3])


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "c.pt"

    def fill(news: News) -> None:
        def full(path: Path, content: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        if news.step == 6:
            monkeypatch.setattr(Path, "write_bytes", full)

    with pytest.raises(ValueError, match=r"the disk is full.*--resume"):
        Loop(distil(), some_texts(), OPTIONS, rising(), place, tell=fill).run()
    monkeypatch.undo()
    assert read_checkpoint(place)["standing"]["step"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    place = tmp_path / "c.pt"
    place.write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match="is damaged: delete it"):
        Loop(distil(), some_texts(), OPTIONS, rising(), place).resume()


def test_a_batch_is_shared_by_all_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--batch is 4: give a multiple of 3"):
        Loop(distil(), some_texts(), OPTIONS, rising(), tmp_path / "c.pt", Processes(0, 3))


def test_the_learning_rate_rises_and_falls() -> None:
    options = LoopOptions(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [options.rate(step / 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert options.rate(1.0) == pytest.approx(0)


def test_some_weights_learn_slower_and_the_loss_may_change(tmp_path: Path) -> None:
    class Slow(Distil):
        done: tuple[float, ...] = ()

        def pace(self, name: str) -> float:
            return 0.0 if name.startswith("model.layers") else 1.0

        def proceed(self, done: float) -> None:
            self.done = (*self.done, done)

    method = Slow(student(), tiny(TARGET, dtype=torch.float32))
    before = {name: weight.detach().clone() for name, weight in method.module.named_parameters()}
    Loop(method, some_texts(), OPTIONS, rising(), tmp_path / "c.pt").run()
    for name, weight in method.module.named_parameters():
        assert torch.equal(weight, before[name]) == name.startswith("model.layers")
    assert method.done == pytest.approx([step / 12 for step in range(12)])
    again = Loop(method, some_texts(), replace(OPTIONS, steps=13), rising(), tmp_path / "c.pt")
    again.resume()
    again.run()
    assert sorted(group["pace"] for group in again.optimizers[0].param_groups) == [0.0, 1.0]


def test_a_time_limit_ends_it_with_the_rate_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, rates = [100.0], []

    class Watched(Loop):
        def _learn(self, rate: float) -> None:
            now[0] += 1.0
            rates.append(rate)
            super()._learn(rate)

    monkeypatch.setattr("forerun.train.loop.time.perf_counter", lambda: now[0])
    options = replace(OPTIONS, steps=1_000_000, every=None, time_limit=20.0, patience=None)
    loop = Watched(distil(), some_texts(), options, rising(), tmp_path / "c.pt")
    standing = loop.run()
    assert standing.step == len(rates) == 20
    assert [row["step"] for row in standing.history] == list(range(0, 21, 2)), "ten measurements"
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)
    assert standing.seconds == 20
    # What an earlier session took counts.
    now[0] = 500.0
    again = Watched(distil(), some_texts(), replace(options, time_limit=25.0), rising(), tmp_path / "c.pt")
    again.resume()
    assert again.run().step == 25


def test_losses_are_looked_at_later_and_still_refused(tmp_path: Path) -> None:
    place = tmp_path / "c.pt"
    options = replace(OPTIONS, steps=20, every=10)
    told: list[int] = []
    loop = Loop(
        Faulty(math.nan, after=12), some_texts(), options, rising(), place, tell=lambda n: told.append(n.step), look=4
    )
    with pytest.raises(ValueError, match=r"loss is nan at step 13.*from step 10 with --resume"):
        loop.run()
    assert told == [4, 8, 12]
    assert all(bool(weight.isfinite().all()) for weight in read_checkpoint(place)["weights"].values())


def test_a_batch_may_be_so_many_tokens(tmp_path: Path) -> None:
    options = replace(OPTIONS, batch_tokens=60)
    standing = Loop(distil(), some_texts(), options, rising(), tmp_path / "c.pt").run()
    assert standing.history[-1]["loss"] < standing.history[1]["loss"]


def test_news_are_told(tmp_path: Path) -> None:
    told: list[News] = []
    standing: Standing = Loop(distil(), some_texts(), OPTIONS, rising(), tmp_path / "c.pt", tell=told.append).run()
    assert [news.step for news in told] == list(range(1, 13))
    assert told[-1].seconds_left == 0
    assert (told[-1].measure, told[-1].steps, standing.best) == (2.0, 12, 3.0)


def test_matrices_of_layers_are_moved_as_a_whole() -> None:
    method = distil()
    whole, rest = optimizers(method, "muon", torch.device("cpu"))
    assert isinstance(whole, torch.optim.Muon)
    named = {id(weight): name for name, weight in method.module.named_parameters()}
    moved = [named[id(weight)] for group in whole.param_groups for weight in group["params"]]
    others = [named[id(weight)] for group in rest.param_groups for weight in group["params"]]
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"} <= set(moved)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(others)
    assert sorted(moved + others) == sorted(named[id(w)] for w in method.module.parameters() if w.requires_grad)
