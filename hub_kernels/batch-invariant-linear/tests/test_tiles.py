"""Tile shapes are speed only: every one of the plan gives the same bits, on shapes with ragged ends."""

import pytest
import torch

SHAPES = [(4096, 1024), (576, 576), (320, 1000), (257, 72), (8, 4096), (1, 17)]  # (N, K)
CUDA = torch.device("cuda")
HALF = [torch.float16, torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_gives_the_same_bits(module, assert_same_bits, shape, dtype):
    launch, plan = module("_launch"), module("plan")
    n, k = shape
    for rows in (1, 77, 300):
        x, weight = module("selfcheck").cancelling(rows, n, k, dtype, CUDA)
        want = launch.launch_linear(x, weight, None)
        for tile in plan.all_tiles(k, dtype, launch.gpu_of(x.device)):
            if not launch.serves(tile, x, weight):
                continue  # tensor descriptors cannot describe these rows, and the plan does not ask for it
            for apart in (False, True):
                got = launch.launch_linear(x, weight, None, tile, apart)
                assert_same_bits(got, want, f"{rows} rows, {tile}, splits apart {apart}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(520, 640), (72, 200)], ids=str)
def test_every_tile_of_experts_gives_the_bits_of_linear(module, assert_same_bits, shape, dtype):
    launch, plan = module("_launch"), module("plan")
    n, k = shape
    for ends in ([3, 3, 50, 300], [0, 1, 2, 2], [0, 0, 0, 0], [300, 300, 300, 300]):
        x, weight = module("selfcheck").cancelling(300, 4 * n, k, dtype, CUDA)
        weight = weight.view(4, n, k)
        starts = [0, *ends[:-1]]
        parts = [launch.launch_linear(x[a:b], w, None) for a, b, w in zip(starts, ends, weight, strict=True)]
        want = torch.cat([*parts, x.new_zeros(300 - ends[-1], n)])
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        assert_same_bits(launch.launch_grouped_linear(x, weight, offsets), want, f"planned, {ends}")
        for tile in plan.all_tiles(k, dtype, launch.gpu_of(x.device)):
            if launch.serves(tile, x, weight[0]):
                assert_same_bits(launch.launch_grouped_linear(x, weight, offsets, tile), want, f"{tile}, {ends}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])
def test_another_order_of_k_is_seen(assert_same_bits, module, dtype):
    """The control: the same operands with K reversed have other bits, so the test above can fail."""
    launch = module("_launch")
    x, weight = module("selfcheck").cancelling(77, 320, 1000, dtype, CUDA)
    with pytest.raises(AssertionError):
        assert_same_bits(launch.launch_linear(x.flip(1), weight.flip(1), None), launch.launch_linear(x, weight, None))


@pytest.mark.parametrize("capability", [(9, 0), (8, 6), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=lambda dtype: str(dtype)[6:])
def test_plan_serves_every_number_of_rows_with_a_listed_tile(module, dtype, capability):
    plan = module("plan")
    gpu = plan.Gpu(capability=capability, multiprocessors=132)
    for n, k in [(1, 64), (576, 576), (4096, 256), (6144, 257), (151936, 1024)]:
        for rows in (1, 4, 5, 16, 17, 33, 64, 65, 128, 1000, 10**6):
            for descriptors in (False, True):
                call = dict(rows=rows, n=n, k=k, dtype=dtype, descriptors=descriptors, gpu=gpu)
                for tile in (plan.linear_tile(**call), plan.grouped_tile(**call, experts=8)):
                    assert tile in plan.all_tiles(k, dtype, gpu)
                    assert descriptors or not tile.tma


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])
def test_where_tiles_do_not_agree_one_tile_serves_every_number_of_rows(
    kernel, module, monkeypatch, assert_same_bits, dtype
):
    """A verdict against the tiles, forced: fewer of them, the same guarantee."""
    launch, plan, used = module("_launch"), module("plan"), []
    monkeypatch.setenv("HF_BATCHINV_ENGINE", "triton")
    monkeypatch.setattr(module("selfcheck"), "tiles_agree", lambda dtype, device: False)
    monkeypatch.setattr(module("linear"), "_gpu_calls", {})
    pointer = launch._pointer_launch
    monkeypatch.setattr(launch, "_pointer_launch", lambda *args: used.append(args[4]) or pointer(*args))
    x, weight = module("selfcheck").cancelling(300, 512, 1024, dtype, CUDA)
    want = kernel.linear(x, weight)
    for rows in (1, 2, 16, 64, 129):
        assert_same_bits(kernel.linear(x[:rows], weight), want[:rows], f"{rows} rows")
    assert set(used) == {plan.only_tile(x.shape[1], dtype)}


@pytest.mark.parametrize(
    ("capability", "shared_kib", "table"),
    [((10, 0), 227, "ROOMY"), ((12, 0), 99, "DEFAULT"), ((8, 0), 163, "DEFAULT"), ((0, 0), 99, "DEFAULT")],
    ids=str,
)
def test_a_gpu_that_was_not_measured_gets_the_default_of_its_kind(module, capability, shared_kib, table):
    plan, tiles = module("plan"), module("tiles")
    assert capability not in tiles.TUNED
    gpu = plan.Gpu(capability=capability, multiprocessors=100, shared_kib=shared_kib)
    assert plan.table_of(gpu) is getattr(tiles, table)
