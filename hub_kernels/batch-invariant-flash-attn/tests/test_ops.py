"""The registered ops: schema, fake tensors, torch.compile, autocast and autograd."""

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def operands(dtype=torch.float32, q_len=5, kv_len=9):
    query, key, value = torch.randn(2, 4, q_len, 16), torch.randn(2, 2, kv_len, 16), torch.randn(2, 2, kv_len, 24)
    return [x.to(dtype) for x in (query, key, value)]


def packed_operands(dtype=torch.float32):
    query, key, value = (x.to(dtype) for x in (torch.randn(9, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 24)))
    return query, key, value, torch.tensor([0, 4, 9]).int(), torch.tensor([0, 6, 12]).int(), 5, 6


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_opcheck(module, dtype):
    attention = module("attention")
    settings = (True, 0.25, -1, -1, 0.0)
    torch.library.opcheck(attention._attention_op, (*operands(dtype), *settings, None, None, None, None, None))
    zeros = torch.zeros(2, dtype=torch.int32)
    more = (torch.zeros(4), torch.zeros(2, 1, 5, 9), torch.ones(2, 9, dtype=torch.bool), zeros, zeros)
    torch.library.opcheck(attention._attention_op, (*operands(dtype), *settings, *more))
    packed = packed_operands(dtype)
    torch.library.opcheck(attention._attention_varlen_op, (*packed, *settings, None, None))
    origin = torch.zeros(packed[3].numel() - 1, dtype=torch.int32)
    torch.library.opcheck(attention._attention_varlen_op, (*packed, *settings, torch.zeros(4), origin))


def test_compiled_has_the_bits_of_eager(kernel, assert_same_bits):
    torch._dynamo.reset()

    def run(query, key, value, origin):
        return kernel.attention(query, key, value, causal=True, origin=origin, window=(6, 0)) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for q_len, kv_len in ((5, 9), (1, 70), (33, 140)):
        arguments = (*operands(q_len=q_len, kv_len=kv_len), torch.tensor([0, 2], dtype=torch.int32))
        assert_same_bits(compiled(*arguments), run(*arguments), f"{q_len} {kv_len}")


def test_compiled_flash_attention_functions_have_the_bits_of_eager(kernel, assert_same_bits):
    torch._dynamo.reset()
    flash = torch.compile(lambda *x: kernel.flash_attn_func(*x, causal=True) + 0, fullgraph=True, backend="aot_eager")
    arguments = [x.transpose(1, 2) for x in operands()]
    assert_same_bits(flash(*arguments), kernel.flash_attn_func(*arguments, causal=True) + 0)
    varlen = torch.compile(
        lambda *x: kernel.flash_attn_varlen_func(*x, causal=True) + 0, fullgraph=True, backend="aot_eager"
    )
    arguments = packed_operands()
    assert_same_bits(varlen(*arguments), kernel.flash_attn_varlen_func(*arguments, causal=True) + 0)


def test_backward_is_refused(kernel, assert_same_bits):
    query, key, value = operands()
    want = kernel.attention(query, key, value, causal=True)
    got = kernel.attention(query.clone().requires_grad_(), key, value, causal=True)
    assert_same_bits(got.detach(), want)
    with pytest.raises(RuntimeError, match="has no backward"):
        got.sum().backward()


def test_autocast_changes_nothing(kernel, assert_same_bits):
    arguments = operands()
    want = kernel.attention(*arguments, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(kernel.attention(*arguments, causal=True), want)
        got = kernel.attention(arguments[0].clone().requires_grad_(), *arguments[1:], causal=True)
        assert_same_bits(got.detach(), want)


def test_public_names(kernel):
    names = ["attention", "attention_varlen", "flash_attn_func", "flash_attn_varlen_func", "prepare_key_mask"]
    assert kernel.__all__ == names


# --- refusals ---


def refusal(error, change, match):
    return pytest.param(error, change, match, id=match.replace(" ", "_"))


@pytest.mark.parametrize(
    "error, change, match",
    [
        refusal(TypeError, lambda a: a.update(query=a["query"].to(torch.float8_e4m3fn)), "query of dtype"),
        refusal(TypeError, lambda a: a.update(query=a["query"].int()), "query of dtype float32"),
        refusal(TypeError, lambda a: a.update(key=a["key"].half()), "key of the dtype of query"),
        refusal(ValueError, lambda a: a.update(value=a["value"].to("meta")), "value on the device of query"),
        refusal(ValueError, lambda a: a.update(query=a["query"][0]), "query of shape"),
        refusal(ValueError, lambda a: a.update(query=a["query"][..., :12], key=a["key"][..., :12]), "head_dim to be"),
        refusal(ValueError, lambda a: a.update(value=torch.ones(2, 2, 9, 264)), "value head_dim to be"),
        refusal(ValueError, lambda a: a.update(key=torch.ones(2, 2, 9, 24)), "key with the head_dim"),
        refusal(ValueError, lambda a: a.update(query=a["query"][:, :3]), "multiple of that of key heads"),
        refusal(ValueError, lambda a: a.update(query=a["query"][:1]), "batch size of query"),
        refusal(ValueError, lambda a: a.update(value=torch.ones(2, 2, 8, 16)), "value to have the shape of key"),
        refusal(ValueError, lambda a: a.update(scale=0.0), "scale to be positive"),
        refusal(ValueError, lambda a: a.update(scale=float("nan")), "scale to be positive and"),
        refusal(ValueError, lambda a: a.update(softcap=-1.0), "softcap to be 0"),
        refusal(ValueError, lambda a: a.update(window=(-2, 0)), "window to be two"),
        refusal(ValueError, lambda a: a.update(sinks=torch.ones(3)), "sinks of shape"),
        refusal(TypeError, lambda a: a.update(mask=torch.ones(2, 4, 5, 9, dtype=torch.int64)), "mask to be bool"),
        refusal(ValueError, lambda a: a.update(mask=torch.ones(2, 4, 5, 8)), "mask broadcastable"),
        refusal(ValueError, lambda a: a.update(mask=torch.ones(2, 3, 5, 9)), "mask broadcastable to"),
        refusal(ValueError, lambda a: a.update(mask=torch.ones(5, 9)), "mask broadcastable to "),
        refusal(TypeError, lambda a: a.update(key_mask=torch.ones(2, 9)), "key_mask to be bool"),
        refusal(ValueError, lambda a: a.update(key_mask=torch.ones(1, 9, dtype=torch.bool)), "key_mask of shape"),
        refusal(ValueError, lambda a: a.update(origin=torch.ones(2)), "origin to be an integer"),
        refusal(ValueError, lambda a: a.update(query_offset=torch.ones(1, dtype=torch.int32)), "query_offset to be"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(kernel, error, change, match):
    query, key, value = operands()
    arguments = dict(query=query, key=key, value=value, causal=True)
    change(arguments)
    with pytest.raises(error, match=match) as caught:
        kernel.attention(**arguments)
    message = str(caught.value)
    assert message.startswith("attention: expected ") and ", got " in message and "; " in message
    assert "\n" not in message and ". " not in message


def test_wrong_packed_arguments_are_refused(kernel):
    query, key, value, ends_q, ends_k, longest_q, longest_k = packed_operands()
    for change in (
        dict(cu_seqlens_q=ends_q.long()),
        dict(cu_seqlens_k=ends_k[:-1]),
        dict(query=query[None]),
        dict(key=key.half()),
    ):
        arguments = dict(query=query, key=key, value=value, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        arguments |= dict(max_seqlen_q=longest_q, max_seqlen_k=longest_k, causal=True)
        with pytest.raises((TypeError, ValueError), match="attention_varlen: expected"):
            kernel.attention_varlen(**(arguments | change))
