"""Random numbers that all ranks agree on, products in fp32, and views of a flat tensor."""

from typing import Any

import pytest
import torch

from ch_core.numerics import cut, exact_products, seeded_normals

CPU = torch.device("cpu")


def test_numbers_depend_on_seed_and_key_only() -> None:
    same = seeded_normals("1/2", {"w": (2, 9)}, CPU)["w"]
    beside = seeded_normals("1/2", {"v": (7,), "w": (2, 9)}, CPU)
    assert torch.equal(same, beside["w"])
    assert list(beside) == ["v", "w"]
    for seed, key in (("2/2", "w"), ("1/2", "v"), ("1/3", "w")):
        assert not torch.equal(same, seeded_normals(seed, {key: (2, 9)}, CPU)[key])


def test_numbers_are_of_no_generator_of_torchs_and_move_none() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = seeded_normals("0", {"w": (3, 3)}, CPU)["w"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(seeded_normals("0", {"w": (3, 3)}, CPU)["w"], drawn)


def test_numbers_do_not_depend_on_torchs_defaults() -> None:
    expected = seeded_normals("0/0", {"w": (2, 8)}, CPU)["w"]
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            found = seeded_normals("0/0", {"w": (2, 8)}, CPU)["w"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.device == CPU
    assert torch.equal(found, expected)


def test_numbers_are_normal_and_rows_have_length_one_if_requested() -> None:
    normal = seeded_normals("0", {"w": (1000, 100)}, CPU)["w"]
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    unit = seeded_normals("0", {"w": (1000, 100)}, CPU, unit=True)["w"]
    torch.testing.assert_close(unit, normal / normal.norm(dim=1, keepdim=True))


def test_a_dry_run_draws_nothing() -> None:
    found = seeded_normals("0", {"w": (2, 8)}, torch.device("meta"), unit=True)["w"]
    assert found.is_meta
    assert found.shape == (2, 8)


@pytest.mark.parametrize("allowed", ["tf32", "bf16", "ieee"])
def test_the_users_choice_of_products_is_back_after_an_error(allowed: str) -> None:
    backend: Any = torch.backends.mkldnn.matmul
    before, seen = backend.fp32_precision, []

    def fails() -> None:
        with exact_products(CPU):
            seen.append(backend.fp32_precision)
            raise ZeroDivisionError

    backend.fp32_precision = allowed
    try:
        with pytest.raises(ZeroDivisionError):
            fails()
        assert seen == ["ieee"]
        assert backend.fp32_precision == allowed
    finally:
        backend.fp32_precision = before


@pytest.mark.parametrize("allowed", ["high", "medium"])
def test_products_are_exact_by_both_of_torchs_settings(allowed: str) -> None:
    """On CUDA torch refuses products while its older and newer setting contradict each other. Reading them is a
    sufficient test.
    """
    torch.set_float32_matmul_precision(allowed)
    try:
        before = [matmul.fp32_precision for matmul in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
        with exact_products(torch.device("cuda")):
            assert torch.backends.cuda.matmul.allow_tf32 is False
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == allowed
        assert torch.backends.cuda.matmul.allow_tf32 is True
        assert before == [m.fp32_precision for m in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_are_exact_if_only_the_newer_setting_was_used() -> None:
    backend: Any = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        with exact_products(torch.device("cuda")):
            assert backend.fp32_precision == "ieee"
            assert backend.allow_tf32 is False
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = before


def test_pieces_are_views_one_after_another() -> None:
    flat = torch.zeros(10)
    pieces = cut(flat, [(2, 3), (), (0, 4), (2,)])
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert [piece.shape for piece in pieces] == [(2, 3), (), (0, 4), (2,)]
    assert flat.tolist() == [1.0] * 6 + [2.0] + [4.0] * 2 + [0.0]  # no piece covers the remainder
    with pytest.raises(RuntimeError):
        cut(flat, [(11,)])
