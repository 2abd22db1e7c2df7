"""The spectral entropy of a change of W_Q W_K^T."""

from types import SimpleNamespace

import pandas as pd
import torch

from lowprec.records.explosion import Explosion
from lowprec.studies.spectral import entropy, rings


def test_it_is_that_of_the_whole_matrix():
    g = torch.Generator().manual_seed(0)
    q, k, dq, dk = (torch.randn(3, 4, 20, generator=g, dtype=torch.float64) for _ in range(4))
    found, largest = entropy(q, k, dq, dk)
    values = torch.linalg.svdvals(dq.mT @ k + q.mT @ dk).square()
    share = values / values.sum(1, keepdim=True)
    wanted = -torch.special.xlogy(share, share).sum(1)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(largest, share[:, 0], rtol=1e-9, atol=1e-9)


def test_one_direction_has_none():
    q, k = torch.zeros(1, 4, 20), torch.randn(1, 4, 20, generator=torch.Generator().manual_seed(0))
    dq = torch.zeros(1, 4, 20)
    dq[0, 0] = 1.0
    found, largest = entropy(q, k, dq, torch.zeros_like(k))
    assert abs(found.item()) < 1e-9 and abs(largest.item() - 1) < 1e-9


def test_a_run_rings_below_nine_tenths_of_the_least_of_healthy_ones():
    rows = [("refined", 800, 0, 1.0), ("refined", 600, 0, 0.1), ("fa2", 800, 0, 0.91),
            ("fa2", 800, 1, 0.95), ("fa2", 900, 1, 0.89), ("fa2", 900, 0, 0.9),
            ("fa2", 1300, 0, 0.0)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["arm", "step", "head", "entropy"]).assign(layer=0, seed=4)
    sigma = [(step, 0, head, 1.0 + head) for step in (49, 99) for head in (0, 1)]
    probes = pd.DataFrame(sigma, columns=["step", "layer", "head", "sigma_q"])
    run = SimpleNamespace(probes=probes, explosion=Explosion(1200, True), metrics=range(1800))
    assert rings(table, {4: run}).loc[4].to_dict() == dict(notice=300, largest=True)
    silent = table[table.arm == "refined"]
    assert rings(silent, {4: run}).loc[4].to_dict() == dict(notice=0, largest=False)
