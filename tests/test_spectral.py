"""The spectral entropy of a change of W_Q W_K^T."""

import torch

from lowprec.studies.spectral import entropy


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
