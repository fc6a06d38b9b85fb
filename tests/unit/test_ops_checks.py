import pytest
import torch

from profiler.ops.checks import check_tensor, same_device


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("cuda", "cuda:0", True), ("cuda:1", "cuda:0", False), ("cuda:1", "cuda:1", True), ("cpu", "cuda", False)],
)
def test_a_device_without_an_index_is_any_of_its_type(one: str, other: str, same: bool) -> None:
    assert same_device(torch.device(one), torch.device(other)) is same
    assert same_device(torch.device(other), torch.device(one)) is same


def test_a_tensor_on_another_device_is_refused() -> None:
    check_tensor("keys", torch.zeros(2, 3), ("T", 3), (torch.float32,), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"keys: expected a tensor on cuda, found \(2, 3\) float32 on cpu"):
        check_tensor("keys", torch.zeros(2, 3), ("T", 3), (torch.float32,), torch.device("cuda"))
