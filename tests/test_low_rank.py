"""What directions keep of a matrix."""

import torch

from lowprec.studies.low_rank import share


def test_all_directions_keep_all_and_others_nothing():
    draw = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(6, 10, generator=draw, dtype=torch.float64))
    values = torch.tensor([3.0, 2, 1, 0, 0, 0], dtype=torch.float64)
    matrix = u @ torch.diag(values) @ vh[:6]
    assert abs(share(matrix, vh[:3]) - 1) < 1e-12
    assert abs(share(matrix, vh[:1]) - 9 / 14) < 1e-12
    assert share(matrix, vh[3:]) < 1e-12
