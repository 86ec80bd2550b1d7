"""The operators are opaque to torch.compile and pass torch's own checks of custom operators."""

import pytest
import torch


def operator_calls(submodule):
    bf16 = torch.bfloat16
    x, weight = torch.randn(3, 4, 24, dtype=bf16), torch.randn(24)
    gate = torch.randn(3, 4, 24)
    f32 = torch.float32
    rms_norm = submodule("rms_norm")._rms_norm_op
    layer_norm = submodule("layer_norm")._layer_norm_op
    softmax, reduce = submodule("softmax")._softmax_op, submodule("reduce")._reduce_op
    return [
        (rms_norm, (x, None, weight, 1e-6, 24, 0.0, False, "silu", f32, bf16, f32, f32)),
        (rms_norm, (x, gate, None, 1e-6, 12, 1.0, True, "sigmoid", bf16, f32, f32, bf16)),
        (layer_norm, (x, weight, weight, 1e-5, 24, f32, f32, bf16)),
        (softmax, (x, 1, False, f32)),
        (softmax, (x.t() if x.dim() == 2 else x.transpose(0, 2), 0, True, bf16)),
        (reduce, (x, [0, 2], True, True, bf16)),
        (reduce, (x, [1], False, False, f32)),
        (reduce, (torch.randn(()), [], False, False, f32)),
    ]


def test_operators_pass_opcheck(submodule):
    for operator, arguments in operator_calls(submodule):
        torch.library.opcheck(operator, arguments)


def everything(kernel, x, gate, weight):
    y = kernel.rms_norm(x, weight, 1e-6)
    y = kernel.rms_norm_gated(y, gate, weight, 1e-6, gate_before=True, group_size=8)
    y = kernel.layer_norm(y, (24,), weight, weight, 1e-5)
    total = kernel.sum(y, -1, keepdim=True) + kernel.mean(y)
    return kernel.softmax(y, 0) + kernel.log_softmax(y, -1) + total


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_has_same_bits_as_eager(kernel, assert_same_bits, dynamic):
    torch._dynamo.reset()
    weight = torch.randn(24, dtype=torch.bfloat16)
    compiled = torch.compile(
        lambda x, gate: everything(kernel, x, gate, weight), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for rows in (7, 1, 30) if dynamic else (7,):
        x, gate = torch.randn(rows, 24).bfloat16(), torch.randn(rows, 24).bfloat16()
        assert_same_bits(compiled(x, gate), everything(kernel, x, gate, weight), f"{rows} rows")


@pytest.mark.gpu
def test_compiled_by_inductor_has_same_bits_as_eager_on_gpu(kernel, assert_same_bits):
    torch._dynamo.reset()
    weight = torch.randn(4096, dtype=torch.bfloat16, device="cuda")

    def norm(x):
        return kernel.softmax(kernel.rms_norm(x, weight, 1e-6), -1)

    compiled = torch.compile(norm, fullgraph=True)
    for rows in (1, 7, 300):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        assert_same_bits(compiled(x), norm(x), f"{rows} rows")
