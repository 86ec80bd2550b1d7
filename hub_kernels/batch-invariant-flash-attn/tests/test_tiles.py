"""Tiles, and whether splits run in one program or in many, are speed only: all give the same bits."""

import pytest
import torch

HEADS = [(32, 8, 128), (9, 3, 64), (8, 8, 80), (16, 2, 256), (4, 1, 16), (14, 2, 64)]  # query heads, KV heads, head_dim
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Settings of `launch_attention`: plain causal attention, but for its scale.
PLAIN = dict(causal=True, window_left=-1, window_right=-1, softcap=0.0)
PLAIN |= dict.fromkeys(("sinks", "mask", "key_mask", "origin", "query_offset"))
# What is added to it; each compiles every tile anew, so each is a test.
CHANGES = {"plain": {}, "window": {"window_left": 300}, "softcap and sinks": {"softcap": 20.0}}


def tiles_of(module, head_dim, dtype=torch.bfloat16):
    """Every tile that may serve such heads on this GPU, the Hopper kernel's (if it has one) last."""
    gpu = module("_launch").gpu_of(torch.device("cuda", 0))
    return module("plan").all_tiles(head_dim=head_dim, value_head_dim=head_dim, dtype=dtype, gpu=gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_tile_and_every_split_gives_the_same_bits(module, assert_same_bits, change, heads, dtype):
    launch = module("_launch")
    query_heads, kv_heads, head_dim = heads
    generator = torch.Generator("cuda").manual_seed(0)

    def states(count, length):
        return torch.randn(2, count, length, head_dim, device="cuda", generator=generator).to(dtype)

    query, key, value = states(query_heads, 700), states(kv_heads, 1400), states(kv_heads, 1400)
    origin = torch.tensor([0, 37], dtype=torch.int32, device="cuda")
    call = PLAIN | dict(scale=head_dim**-0.5, origin=origin) | CHANGES[change]
    if call["softcap"]:
        call["sinks"] = torch.randn(query_heads, device="cuda", generator=generator).to(dtype)
    want = launch.launch_attention(query, key, value, **call)
    for tile in tiles_of(module, head_dim, dtype):
        last = tile.rows * kv_heads // query_heads if tile.decode else query.shape[2]
        for split in (False,) if tile.hopper else (False, True, 1024) if tile.decode else (False, True):
            got = launch.launch_attention(query[:, :, -last:], key, value, **call, tile=tile, split=split)
            assert_same_bits(got, want[:, -last:], f"{tile}, split {split}")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_heads_that_do_not_fill_half_a_tile(module, assert_same_bits, head_dim):
    """Seven heads to a KV head, or queries at odd addresses: no descriptor can bring them to the Hopper kernel."""
    launch, tiles, call = module("_launch"), tiles_of(module, head_dim), PLAIN | dict(scale=0.1)
    for group, odd in ((7, 0), (4, 1)):
        states = torch.randn(2, 700, group + 2, head_dim + odd, device="cuda", dtype=torch.bfloat16)
        query, key, value = states[..., :head_dim].transpose(1, 2).split((group, 1, 1), dim=1)
        key, value = key.contiguous(), value.contiguous()
        want = launch.launch_attention(query, key, value, **call, tile=tiles[0], split=False)
        for tile in tiles[1:]:
            if tile.decode:
                continue
            got = launch.launch_attention(query, key, value, **call, tile=tile, split=False)
            assert_same_bits(got, want, f"{group} heads, {tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_tiles_in_layouts_of_all_kinds(module, assert_same_bits, head_dim):
    """Rows 16 bytes longer than the head, a batch of one at any stride, heads beside each other, one key, 64 rows."""
    launch, call = module("_launch"), PLAIN | dict(scale=0.1)
    tiles = [tile for tile in tiles_of(module, head_dim) if tile.decode]
    if not tiles:
        pytest.skip("this GPU has no decode kernel")
    for heads, q_len, kv_len in ((8, 1, 700), (8, 8, 700), (7, 9, 300), (3, 1, 1), (1, 1, 64), (64, 1, 513)):
        long_rows = torch.randn(2, heads + 2, 1000, head_dim + 8, device="cuda", dtype=torch.bfloat16)[..., :head_dim]
        side_by_side = torch.randn(2, 1000, heads + 2, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        one = torch.randn(3 + (heads + 2) * 1000 * head_dim, device="cuda", dtype=torch.bfloat16)
        one = (
            one[:-3]
            .view(heads + 2, 1000, head_dim)
            .as_strided((1, heads + 2, 1000, head_dim), (3, 1000 * head_dim, head_dim, 1))
        )
        for states in (long_rows, side_by_side, one):
            query, key, value = states[:, :heads, :q_len], states[:, heads:-1, :kv_len], states[:, -1:, :kv_len]
            plain = [each.contiguous() for each in (query, key, value)]
            want = launch.launch_attention(*plain, **call, tile=tiles_of(module, head_dim)[0], split=False)
            for tile in tiles:
                if heads * q_len <= tile.rows:
                    for split in (False, True):
                        got = launch.launch_attention(query, key, value, **call, tile=tile, split=split)
                        assert_same_bits(got, want, f"{heads} heads, {q_len} x {kv_len}, {tile}, split {split}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("heads, head_dim", [((28, 4), 128), ((9, 3), 64)])
def test_packed_decode_steps_have_the_bits_of_single_ones(module, kernel, assert_same_bits, heads, head_dim, dtype):
    lengths_q, lengths_k = [1, 0, 3, 1, 1], [900, 5, 0, 6000, 1]
    q = torch.randn(sum(lengths_q), heads[0], head_dim, device="cuda").to(dtype)
    k, v = torch.randn(2, sum(lengths_k), heads[1], head_dim, device="cuda").to(dtype)
    bounds = [
        torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    ]
    packed = kernel.attention_varlen(q, k, v, *bounds, max(lengths_q), max(lengths_k), causal=True)
    parts = zip(*(x.split(lengths) for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))), strict=True)
    for part, got in zip(parts, packed.split(lengths_q), strict=True):
        if 0 in (len(part[0]), len(part[1])):
            assert (got == 0).all()
        else:
            alone = kernel.attention(*(x.transpose(0, 1)[None] for x in part), causal=True)
            assert_same_bits(got, alone[0].transpose(0, 1), f"{part[0].shape} {part[1].shape}")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(14, 2, 64), (9, 3, 64), (7, 1, 128), (16, 4, 128)], ids=str)
def test_tiles_without_blocks_hold_nothing_up(module, assert_same_bits, heads):
    """Rows that see no key, and tiles past the end: the Hopper kernel's warps run ahead of each other there."""
    launch, head_dim = module("_launch"), heads[-1]
    query, key = (torch.randn(2, count, 900, head_dim, device="cuda", dtype=torch.bfloat16) for count in heads[:2])
    value = key.flip(2)
    tiles = tiles_of(module, head_dim)
    for origin in ([0, 0], [899, 600], [0, 850]):
        call = PLAIN | dict(scale=0.1, origin=torch.tensor(origin, dtype=torch.int32, device="cuda"))
        want = launch.launch_attention(query, key, value, **call, tile=tiles[0], split=False)
        for _ in range(100):
            got = launch.launch_attention(query, key, value, **call, tile=tiles[-1], split=False)
        assert_same_bits(got, want, str(origin))


def test_splits_cover_every_position_once_and_start_on_blocks(module):
    contract = module("contract")
    assert contract.split_begin(0) == 0
    for split in range(90):
        begin, end = contract.split_begin(split), contract.split_begin(split + 1)
        assert begin < end and begin % 128 == 0
        for position in (begin, end - 1):
            assert contract.split_of(position) == split


@pytest.mark.parametrize("keys", [0, 1, 4096, 4700, 5120, None])
def test_multiples_begin_splits(module, keys):
    contract = module("contract")
    multiple = contract.split_multiple(keys)
    begins = {contract.split_begin(split) for split in range(60)}
    assert set(range(0, 20_000 if keys is None else max(keys, 1), multiple)) <= begins
    fewer = range(0, 20_000 if keys is None else max(keys, 1), multiple // 2)
    assert multiple == 256 or not set(fewer) <= begins


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_where_tiles_do_not_agree_one_tile_serves_prefill_and_decode(
    kernel, module, make_sequence, heads, monkeypatch, assert_same_bits, head_dim
):
    """A verdict against the tiles, forced: no shortcut is taken, and the guarantee stands."""
    monkeypatch.setattr(module("selfcheck"), "tiles_agree", lambda **shape: False)
    monkeypatch.setattr(module("attention"), "_gpu_calls", {})
    sequence = make_sequence(700, heads(4, 2, head_dim, head_dim, torch.bfloat16, "cuda"))
    want = sequence.alone(kernel)
    for first, last in ((699, 700), (300, 500), (0, 130)):
        got = sequence.chunk(kernel, first, last, left=37, tail=50, mates=3, place=1)
        assert_same_bits(got, want[:, first:last], f"{first}:{last}")


@pytest.mark.parametrize("capability", [(9, 0), (8, 6), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_plan_serves_every_call_with_a_listed_tile(module, dtype, capability):
    plan = module("plan")
    gpu = plan.Gpu(capability=capability, multiprocessors=132, hopper_kernel=True)
    for head_dim, value_dim in ((16, 16), (64, 64), (80, 80), (128, 64), (192, 128), (256, 256)):
        shape = dict(head_dim=head_dim, value_head_dim=value_dim, dtype=dtype)
        for rows in (1, 4, 16, 17, 64, 65, 128, 4096):
            for total in (1, 8, 64, 1000):
                for splits in (1, 2, 40):
                    for plain in (False, True):
                        call = dict(rows=rows, heads=total, splits=splits, plain=plain, aligned=plain, split_keys=256)
                        call |= dict(keys=256 * splits, blocks=4 * splits, split_bytes=4 * value_dim)
                        tile, split = plan.attention_tile(**call, **shape, gpu=gpu)
                        assert tile in plan.all_tiles(**shape, gpu=gpu)
                        assert not (tile.hopper and (split or not plain or capability != (9, 0)))
                        assert not (tile.decode and (not plain or capability != (9, 0) or rows > tile.rows))
                        assert not split or splits > 1
                        assert split in (False, True) or tile.decode


def test_partial_results_take_bounded_memory(module):
    plan = module("plan")
    gpu = plan.Gpu(capability=(9, 0), multiprocessors=132, hopper_kernel=True)
    call = dict(
        rows=64,
        heads=90,
        keys=10000,
        blocks=4,
        split_bytes=4 * 130,
        head_dim=128,
        value_head_dim=128,
        dtype=torch.bfloat16,
    )
    each = 90 * 64 * call["split_bytes"]
    for splits, apart in ((plan.WORKSPACE_LIMIT // each, True), (plan.WORKSPACE_LIMIT // each + 1, False)):
        for aligned in (False, True):
            call |= dict(plain=True, aligned=aligned, split_keys=1024)
            assert plan.attention_tile(**call, splits=splits, gpu=gpu)[1] == apart


def test_a_crowded_decode_step_gets_smaller_tiles(module):
    plan, tiles = module("plan"), module("tiles")
    gpu = plan.Gpu(capability=(9, 0), multiprocessors=100, hopper_kernel=True, shared_kib=227)
    shape = dict(head_dim=128, value_head_dim=128, dtype=torch.bfloat16)
    crowd = int(100 * tiles.CROWDED_PROGRAMS_PER_SM)
    for heads, splits, crowded in ((crowd, 1, True), (crowd - 1, 1, False), (5, crowd // 5, True), (5, 2, False)):
        call = dict(rows=4, heads=heads, keys=256 * splits, blocks=4 * splits, splits=splits, split_bytes=520)
        call |= dict(plain=True, aligned=False, split_keys=256)
        tile, _ = plan.attention_tile(**call, **shape, gpu=gpu)
        assert (tile.warps == 2) == crowded


@pytest.mark.parametrize("window", [(-1, -1), (5, -1), (-1, 2), (0, 0), (5, 0), (5, 2), (40, 40)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_that_neighbouring_queries_can_see_are_counted(module, causal, window):
    j = torch.arange(30)
    for queries in (1, 4, 50):
        most = 0
        for first in range(-50, 40):
            i = torch.arange(first, first + queries)[:, None]
            visible = (j <= i) | (not causal)
            visible &= (j >= i - window[0]) | (window[0] < 0)
            visible &= (j <= i + window[1]) | (window[1] < 0)
            most = max(most, int(visible.any(0).sum()))
        assert module("plan").visible_keys(queries, kv_len=30, causal=causal, window=window) == most


def test_no_tile_has_more_rows_than_the_plan_says(module):
    plan, tiles = module("plan"), module("tiles")
    tables = (tiles.DEFAULT, tiles.ROOMY, *tiles.TUNED.values(), tiles.HOPPER)
    found = [tile for table in tables for entries in table.values() for _, *entry in entries for tile in entry]
    assert max(tile.rows for tile in found) == plan.MOST_ROWS


@pytest.mark.parametrize(
    ("window", "blocks"), [((-1, -1), 79), ((1023, 0), 17), ((1023, -1), 17), ((31, 0), 1), ((4990, 0), 79)], ids=str
)
def test_a_tile_is_as_long_as_its_window(module, monkeypatch, window, blocks):
    """Of 1000 queries, the 32 in a tile of 4 heads a KV head; not the 5000 keys, nor those that any query sees."""
    pytest.importorskip("triton")
    launch, plan = module("_launch"), module("plan")
    told, plan_tile = [], plan.attention_tile
    monkeypatch.setattr(plan, "attention_tile", lambda **call: told.append(call["blocks"]) or plan_tile(**call))
    query, key = (torch.empty(1, heads, n, 128, dtype=torch.bfloat16) for heads, n in ((8, 1000), (2, 5000)))
    launch.attention_call(query, key, key, *[None] * 5, True, 0.1, *window, 0.0)
    assert told == [blocks]


def most_over_mean(row_tiles, heads, programs, side_by_side, blocks):
    """Work of every program, as the Hopper kernel deals out causal tiles."""
    work = [0] * programs
    sections = [min(side_by_side, heads - first) for first in range(0, heads, side_by_side)]
    order = [tile for heads_here in sections for tile in range(row_tiles, 0, -1) for _ in range(heads_here)]
    for number, tile in enumerate(order):
        wave, turn = divmod(number, programs)
        work[turn if wave % 2 == 0 else programs - 1 - turn] += tile * blocks + 4 * row_tiles
    return max(work) * programs / sum(work)


@pytest.mark.parametrize("heads", [16, 20, 24, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("row_tiles", [8, 16, 32, 64, 128])
def test_the_hopper_kernel_deals_out_equal_work_or_leaves_it_to_the_gpu(module, heads, row_tiles):
    plan = module("plan")
    gpu = plan.Gpu(capability=(9, 0), multiprocessors=132, hopper_kernel=True)
    for blocks, bytes_each in ((16, 2**19), (32, 2**20), (32, 2**21), (64, 2**21), (64, 2**22), (128, 2**22)):
        grid = dict(row_tiles=row_tiles, heads=heads, blocks=blocks, bytes_each=bytes_each, gpu=gpu)
        programs, side_by_side = plan.hopper_grid(**grid)
        most_programs = min(row_tiles * heads, gpu.multiprocessors)
        sizes = {size for size in plan.SMALL_SECTIONS if size < heads and size * bytes_each <= plan.L2_SHARE}
        fits = heads * bytes_each <= plan.L2_WHOLE
        fewest = -(-heads * bytes_each // plan.L2_SHARE)
        for sections in (1,) if fits else range(fewest, min(2 * fewest, fewest + 7, heads) + 1):
            sizes.add(-(-heads // sections))
        work = {size: most_over_mean(row_tiles, heads, most_programs, size, blocks) for size in sizes}
        if not fits and (blocks > plan.PERSISTENT_BLOCKS or min(work.values()) > plan.MOST_UNEVEN):
            assert programs == row_tiles * heads  # one to a tile: the GPU's scheduler
            assert side_by_side * bytes_each <= plan.L2_SHARE
        else:
            even = [size for size in work if work[size] <= min(work.values()) + plan.AS_EVEN]
            assert (programs, side_by_side) == (most_programs, min(even))


def h200(plan):
    return plan.Gpu(capability=(9, 0), multiprocessors=132, hopper_kernel=True, shared_kib=227)


def decode_call(heads, keys, head_dim=128, rows=4, **change):
    splits = -(-keys // 256)
    call = dict(rows=rows, heads=heads, keys=keys, blocks=-(-keys // 64), splits=splits, split_bytes=4 * (head_dim + 2))
    call |= dict(head_dim=head_dim, value_head_dim=head_dim, dtype=torch.bfloat16, plain=True, aligned=True)
    return call | dict(split_keys=256) | change


@pytest.mark.parametrize(
    ("heads", "keys", "split_keys", "split"),
    [
        (8, 256, 256, False),  # one split
        (8, 300, 256, True),
        (99, 4096, 256, False),  # as many programs as keep the GPU busy
        (64, 1024, 256, True),  # 256 programs, of which 264 fit
        (67, 1024, 256, 512),
        (30, 4096, 256, 512),
        (64, 4096, 256, 1024),
        (64, 4096, 1024, 1024),
        (98, 4096, 1024, 2048),
        (64, 600, 1024, True),  # nothing that is cut at multiples of 1024
        (64, 5000, 1024, True),  # some splits are longer than others
    ],
)
def test_decode_programs_take_as_many_splits_as_let_all_of_them_run_at_once(module, heads, keys, split_keys, split):
    plan = module("plan")
    gpu = h200(plan)
    tile, found = plan.attention_tile(**decode_call(heads, keys, split_keys=split_keys), gpu=gpu)
    assert tile.decode
    assert found == split and isinstance(found, bool) == isinstance(split, bool)


@pytest.mark.parametrize(
    ("heads", "head_dim", "decode"),
    [(264, 64, True), (265, 64, False), (396, 64, False), (397, 64, True), (300, 128, True)],
)
def test_half_empty_waves_of_decode_programs_are_left_to_smaller_ones(module, heads, head_dim, decode):
    plan = module("plan")
    gpu = h200(plan)
    tile, split = plan.attention_tile(**decode_call(heads, 2000, head_dim), gpu=gpu)
    assert (tile.decode, split) == (decode, False)
    assert decode or (tile.rows, tile.warps) == (16, 2)
    for change in (dict(rows=17), dict(blocks=2)):
        assert plan.attention_tile(**decode_call(heads, 2000, head_dim, **change), gpu=gpu)[0].decode


def test_operands_that_the_decode_kernel_cannot_address_go_elsewhere(module, monkeypatch):
    pytest.importorskip("triton")
    launch, plan = module("_launch"), module("plan")
    gpu, told = h200(plan), []
    plan_tile = plan.attention_tile
    monkeypatch.setattr(plan, "attention_tile", lambda **call: told.append(call["aligned"]) or plan_tile(**call))
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(launch.selfcheck, "tiles_agree", lambda **shape: True)

    def aligned(query, key, value, mask=None):
        launch.attention_call(query, key, value, None, mask, None, None, None, True, 0.1, -1, -1, 0.0)
        return told[-1]

    def states(count, columns=128, **options):
        return torch.empty(1, count, 9, columns, dtype=torch.bfloat16, device="meta", **options)

    query, key = states(8), states(2)
    assert aligned(query, key, key)
    assert not aligned(states(8, 132)[..., :128], key, key)
    assert not aligned(query, states(2, 129)[..., 1:], key)
    assert not aligned(query, key, states(2, 136)[..., 4:132])
    far = torch.empty_strided((1, 2, 9, 128), (128, 128, 2**24, 1), dtype=torch.bfloat16, device="meta")
    assert not aligned(query, far, key) and not aligned(query, key, far)
    assert not aligned(query, key, key, torch.ones(1, 1, 9, 9, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("rows", [1, 32, 33, 64, 65])
def test_a_decode_tile_holds_all_rows_and_few_blocks_take_few_buffers(module, rows):
    plan = module("plan")
    gpu = h200(plan)
    for keys, stages in ((128, 2), (129, 3)):
        tile, _ = plan.attention_tile(**decode_call(8, keys, rows=rows), gpu=gpu)
        assert tile.decode == (rows <= 64)
        if tile.decode:
            assert (tile.rows, tile.stages) == (32 if rows <= 32 else 64, stages)


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
